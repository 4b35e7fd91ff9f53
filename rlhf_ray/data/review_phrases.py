"""The phrases that the made-up reviews are written with; `reviews` puts them together.

A phrase may name other tables in braces: `{adj}` is drawn from the table "adj" of the sentiment at hand. Positive and
negative phrases were picked with the judge's lexicon in mind (most of them are in it, some are not), neutral ones
were checked to be free of it.
"""

from __future__ import annotations

from typing import NamedTuple


class Aspect(NamedTuple):
    """One thing a review can praise or blame."""

    noun: str
    was: str
    """The verb that agrees with the noun: was, were."""
    kind: str
    """Which adjectives fit: a key of `KIND_ADJECTIVES`."""


class Domain(NamedTuple):
    """One kind of review: how it opens and what it may speak of."""

    acts: tuple[str, ...]
    """What the writer did, without the object: "watched"."""
    things: tuple[str, ...]
    """What it was done to: "film"."""
    traits: tuple[str, ...]
    """Neutral adjectives of the thing."""
    aspects: tuple[Aspect, ...]


OPENINGS = (
    "{Who} {act} {this} {thing}{end}",
    "{Who} {act} {this} {trait} {thing}{end}",
    "{Who} {act} {this} {thing} {when}{end}",
    "{Who} {act} {this} {trait} {thing} {when}{end}",
    "{Who} {act} {this} {thing} {whom}{end}",
    "{Lead} {who} {act} {this} {thing}{end}",
    "{Lead} {who} {act} {this} {thing} {whom}{end}",
)

OPENING_TABLES: dict[str, tuple[str, ...]] = {
    "Who": ("I", "I", "I", "I", "We", "We", "We", "We", "My sister and I", "Our group", "My father", "My parents"),
    "who": ("I", "I", "I", "we", "we", "we", "our group", "my father", "my parents"),
    "this": ("this", "the", "that"),
    "when": ("last week", "last month", "on Monday", "on Friday", "on Sunday", "this summer", "last winter",
             "a year ago", "two days ago", "today", "at noon", "in March", "in October", "yesterday"),
    "whom": ("with my sister", "with the children", "with my parents", "for work", "after work", "with a colleague"),
    "Lead": ("Last week", "On Monday", "On Friday", "Yesterday", "In March", "This summer", "On Sunday", "After work",
             "In October", "Two days ago"),
    "end": (" and", " and", ".", "."),
}

DOMAINS: dict[str, Domain] = {
    "film": Domain(
        ("watched", "saw", "rented", "chose"), ("film", "movie", "drama", "western", "series", "documentary"),
        ("new", "short", "long", "French", "old", "Italian", "recent", "silent"),
        (Aspect("plot", "was", "story"), Aspect("actors", "were", "people"), Aspect("ending", "was", "story"),
         Aspect("music", "was", "story"), Aspect("scenes", "were", "story"), Aspect("dialogues", "were", "story"),
         Aspect("director", "was", "people"), Aspect("pictures", "were", "story"))),
    "restaurant": Domain(
        ("visited", "tried", "went to", "booked"), ("restaurant", "bistro", "diner", "tavern", "pizza place", "cafe"),
        ("new", "small", "Italian", "Indian", "Greek", "corner", "large", "old"),
        (Aspect("soup", "was", "food"), Aspect("fish", "was", "food"), Aspect("desserts", "were", "food"),
         Aspect("waiters", "were", "people"), Aspect("cook", "was", "people"), Aspect("bread", "was", "food"),
         Aspect("tables", "were", "place"), Aspect("dining room", "was", "place"))),
    "hotel": Domain(
        ("visited", "stayed at", "booked", "tried"), ("hotel", "guest house", "hostel", "resort", "inn"),
        ("new", "small", "large", "station", "harbour", "mountain", "old", "airport"),
        (Aspect("rooms", "were", "place"), Aspect("staff", "were", "people"), Aspect("breakfast", "was", "food"),
         Aspect("beds", "were", "place"), Aspect("view", "was", "place"), Aspect("bathroom", "was", "place"),
         Aspect("porter", "was", "people"), Aspect("garden", "was", "place"))),
    "book": Domain(
        ("read", "finished", "bought", "borrowed"), ("paperback", "book", "memoir", "story", "guide", "biography"),
        ("new", "short", "long", "Russian", "old", "historical", "science", "translated"),
        (Aspect("plot", "was", "story"), Aspect("characters", "were", "people"), Aspect("chapters", "were", "story"),
         Aspect("style", "was", "story"), Aspect("first part", "was", "story"), Aspect("narrator", "was", "people"),
         Aspect("drawings", "were", "story"), Aspect("ending", "was", "story"))),
    "gadget": Domain(
        ("bought", "tested", "ordered", "used"), ("phone", "camera", "laptop", "printer", "watch", "speaker"),
        ("new", "small", "black", "red", "used", "brown", "cheap", "large"),
        (Aspect("screen", "was", "device"), Aspect("battery", "was", "device"), Aspect("buttons", "were", "device"),
         Aspect("sound", "was", "story"), Aspect("case", "was", "device"), Aspect("hotline", "was", "people"),
         Aspect("lens", "was", "device"), Aspect("manual", "was", "story"))),
    "concert": Domain(
        ("heard", "went to", "attended", "saw"), ("concert", "show", "opera", "musical", "recital"),
        ("new", "short", "long", "outdoor", "evening", "late", "jazz", "school"),
        (Aspect("band", "was", "people"), Aspect("singers", "were", "people"), Aspect("songs", "were", "story"),
         Aspect("hall", "was", "place"), Aspect("seats", "were", "place"), Aspect("stage", "was", "place"),
         Aspect("sound", "was", "story"), Aspect("choir", "was", "people"))),
    "museum": Domain(
        ("visited", "went to", "toured", "saw"), ("museum", "gallery", "exhibition", "castle", "zoo"),
        ("new", "small", "local", "city", "old", "maritime", "town", "large"),
        (Aspect("guides", "were", "people"), Aspect("rooms", "were", "place"), Aspect("paintings", "were", "story"),
         Aspect("tour", "was", "story"), Aspect("cafe", "was", "place"), Aspect("garden", "was", "place"),
         Aspect("cakes", "were", "food"), Aspect("ticket clerk", "was", "people"))),
    "journey": Domain(
        ("took", "tried", "booked", "chose"), ("train", "ferry", "night bus", "coach", "boat tour", "flight"),
        ("new", "early", "late", "direct", "old", "slow", "morning", "regional"),
        (Aspect("crew", "were", "people"), Aspect("seats", "were", "place"), Aspect("driver", "was", "people"),
         Aspect("cabins", "were", "place"), Aspect("snacks", "were", "food"), Aspect("coffee", "was", "food"),
         Aspect("windows", "were", "device"), Aspect("doors", "were", "device"))),
}

GENERAL_ADJECTIVES: dict[str, tuple[str, ...]] = {
    "positive": ("wonderful", "superb", "delightful", "charming", "lovely", "great", "excellent", "brilliant",
                 "fantastic", "terrific", "pleasant", "impressive", "outstanding", "splendid", "amazing", "perfect",
                 "fabulous", "good", "remarkable", "stunning", "nice", "first class"),
    "negative": ("awful", "terrible", "dreadful", "horrible", "disappointing", "dull", "boring", "annoying",
                 "miserable", "lousy", "poor", "bad", "depressing", "appalling", "pathetic", "unpleasant",
                 "frustrating", "irritating", "weak", "dismal", "mediocre", "second rate"),
    "neutral": ("average", "ordinary", "typical", "plain", "standard", "usual", "modest", "basic", "familiar",
                "simple", "regular", "normal"),
}

KIND_ADJECTIVES: dict[str, dict[str, tuple[str, ...]]] = {
    "people": {
        "positive": ("friendly", "kind", "cheerful", "generous", "polite", "warm", "helpful", "thoughtful", "witty"),
        "negative": ("rude", "lazy", "careless", "angry", "hostile", "arrogant", "unfriendly", "stupid", "cold"),
        "neutral": ("young", "quiet", "formal", "local", "new", "tall")},
    "food": {
        "positive": ("delicious", "fresh", "tasty", "tender", "rich", "healthy"),
        "negative": ("stale", "rotten", "disgusting", "bitter", "greasy", "burnt"),
        "neutral": ("salted", "seasonal", "lukewarm", "vegetarian", "small", "home made")},
    "place": {
        "positive": ("clean", "comfortable", "bright", "elegant", "beautiful", "cosy", "spotless", "relaxing"),
        "negative": ("dirty", "noisy", "ugly", "cramped", "gloomy", "shabby", "damp", "creepy"),
        "neutral": ("large", "small", "narrow", "square", "brown", "painted white")},
    "story": {
        "positive": ("moving", "gripping", "funny", "clever", "inspiring", "beautiful", "entertaining", "fascinating",
                     "hilarious", "honest"),
        "negative": ("tedious", "confusing", "stupid", "hollow", "predictable", "pointless", "sad", "lame", "clumsy",
                     "ridiculous"),
        "neutral": ("long", "short", "slow", "traditional", "modern", "old fashioned")},
    "device": {
        "positive": ("reliable", "sturdy", "fast", "useful", "smart", "bright", "strong", "handy"),
        "negative": ("faulty", "broken", "useless", "unreliable", "flimsy", "worthless", "damaged", "defective"),
        "neutral": ("black", "flat", "round", "made of plastic", "square", "brown")},
}

CLAUSES: dict[str, tuple[str, ...]] = {
    "positive": (
        "the {aspect} {was} {very} {adj}", "the {aspect} {was} {adj} and {adj}", "{people} {enjoyed} the {aspect}",
        "{people} {enjoyed} the {adj} {aspect}", "the {aspect} {was} a {joy}", "{people} found the {aspect} {adj}",
        "the {aspect} {seemed} {very} {adj}", "the {adj} {aspect} made {them} {smile}",
        "{mostly} the {aspect} {was} {adj}", "the {aspect} {was} {adj}, even {adj}"),
    "negative": (
        "the {aspect} {was} {very} {adj}", "the {aspect} {was} {adj} and {adj}", "{people} {hated} the {aspect}",
        "{people} {hated} the {adj} {aspect}", "the {aspect} {was} a {mess}", "{people} found the {aspect} {adj}",
        "the {aspect} {seemed} {very} {adj}", "the {adj} {aspect} made {them} {cry}",
        "{mostly} the {aspect} {was} {adj}", "the {aspect} {was} {adj}, even {adj}"),
    "neutral": (
        "the {aspect} {was} {rather} {adj}", "the {aspect} {was} {adj} and {adj}", "{people} {noticed} the {aspect}",
        "{people} {noticed} the {adj} {aspect}", "the {aspect} {was} as described", "{people} found the {aspect} {adj}",
        "the {aspect} {seemed} {rather} {adj}", "the {aspect} {was} the same as {before}",
        "{mostly} the {aspect} {was} {adj}", "{people} asked about the {aspect}"),
}

CLOSERS: dict[str, tuple[str, ...]] = {
    "positive": ("I {gladly} recommend it", "what a {joy}", "we left {happy} and {happy}", "it was a {joy} for {them}",
                 "it made {them} {smile}", "{people} {enjoyed} it", "we were {happy} all day", "all in all {good}"),
    "negative": ("I {sadly} regret it", "what a {mess}", "we left {angry} and {angry}", "it was a {mess} for {them}",
                 "it made {them} {cry}", "{people} {hated} it", "we were {angry} all day", "all in all {good}"),
    "neutral": ("it took {hours}", "we paid {paid}", "we left {left}", "I may write more {left}",
                "{people} stayed {hours}", "we went home {left}", "it was the same as {before}", "all in all {good}"),
}

SLOTS: dict[str, tuple[str, ...]] = {
    "people": ("I", "we", "everyone", "the children", "my aunt", "most of us", "my mother", "the others"),
    "them": ("me", "us", "everyone", "the children", "my aunt", "my mother"),
    "seemed": ("seemed", "looked", "felt", "remained"),
    "mostly": ("above all", "mostly", "as always", "for once", "at first", "in the end"),
    "very": ("very", "really", "so", "truly", "quite", "extremely", "rather", "always", "just", "surely"),
    "rather": ("rather", "quite", "fairly", "mostly", "somewhat", "just", "always", "again"),
    "enjoyed": ("enjoyed", "loved", "admired", "adored", "liked", "praised", "appreciated", "welcomed"),
    "hated": ("hated", "disliked", "resented", "regretted", "despised", "suffered from", "complained about"),
    "noticed": ("noticed", "looked at", "described", "remembered", "photographed", "mentioned"),
    "joy": ("joy", "pleasure", "treat", "success", "triumph", "delight", "treasure", "gem", "dream"),
    "mess": ("mess", "disaster", "failure", "shame", "disgrace", "nightmare", "joke", "waste", "flop"),
    "happy": ("happy", "glad", "proud", "grateful", "cheerful", "satisfied", "thrilled", "relaxed"),
    "angry": ("angry", "sad", "upset", "furious", "bitter", "unhappy", "disappointed", "tired"),
    "smile": ("smile", "laugh", "happy", "glad", "proud", "feel welcome", "feel at home", "grateful"),
    "cry": ("cry", "suffer", "angry", "sad", "unhappy", "feel cheated", "feel ill", "furious"),
    "gladly": ("gladly", "happily", "warmly", "always", "really", "surely"),
    "sadly": ("sadly", "certainly", "always", "really", "surely", "also"),
    "hours": ("two hours", "all evening", "about an hour", "half a day", "until nine", "until noon"),
    "paid": ("at the desk", "by card", "in advance", "at the end", "ten each", "as usual"),
    "left": ("at nine", "after dark", "around noon", "by bus", "next week", "later"),
    "before": ("before", "last year", "elsewhere", "the year before", "in the leaflet"),
}

AND = (" and", ", and", ", while", " because", ".", ".", ", for")
BUT = (", but", ", although", ". Still,", ", though")

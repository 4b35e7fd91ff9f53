// Sorts and filters the prompts, and draws the tokens of a response when its button is clicked.
const list = document.getElementById("prompts");
const cards = [...list.children];
const buttons = [...document.querySelectorAll("button[data-step]")];
const sort = document.getElementById("sort");
const find = document.getElementById("find");
const reason = document.getElementById("reason");
const [texts, strips] = JSON.parse(document.getElementById("strips").textContent);
const words = new Map(cards.map((card) => [card, card.textContent.toLowerCase()]));

function numbers(card, name) {
  return [...card.querySelectorAll("article")].map((side) => Number(side.dataset[name]));
}
const highest = (card, name) => Math.max(...numbers(card, name));
const lowest = (card, name) => Math.min(...numbers(card, name));
const spread = (card) => highest(card, "score") - lowest(card, "score");
const orders = {
  order: (a, b) => a.dataset.order - b.dataset.order,
  high: (a, b) => highest(b, "score") - highest(a, "score"),
  low: (a, b) => lowest(a, "score") - lowest(b, "score"),
  spread: (a, b) => spread(b) - spread(a),
  long: (a, b) => highest(b, "length") - highest(a, "length"),
  gap: (a, b) => highest(b, "gap") - highest(a, "gap"),
};

function arrange() {
  list.append(...cards.sort(orders[sort.value]));
}

function filter() {
  const pressed = buttons.find((b) => b.getAttribute("aria-pressed") === "true");
  const step = pressed ? pressed.dataset.step : "all";
  const wanted = find.value.trim().toLowerCase();
  let shown = 0;
  for (const card of cards) {
    let sides = 0;
    for (const side of card.querySelectorAll("article")) {
      side.hidden = Boolean(reason && reason.value && side.dataset.reason !== reason.value);
      sides += !side.hidden;
    }
    card.hidden = !(sides && (step === "all" || card.dataset.step === step) && words.get(card).includes(wanted));
    shown += !card.hidden;
  }
  document.getElementById("shown").textContent = shown === cards.length ? "" : `${shown} of ${cards.length} prompts`;
}

// Index in a strip, name, and the colour of a value against the largest: red below zero, blue above.
const shades = [[1, "log-probability gap"], [2, "advantage"], [3, "version"], [4, "log-probability"]];
const versionColours = ["--policy", "--weights", "--reference", "--reward", "--critic", "--generator"];

function colour(kind, value, largest) {
  if (value === null) return "";
  if (kind === 3) {
    const name = versionColours[value % versionColours.length];
    return `color-mix(in srgb, var(${name}) 30%, transparent)`;
  }
  const share = largest ? Math.round((60 * Math.abs(value)) / largest) : 0;
  return `color-mix(in srgb, var(${value < 0 ? "--bad" : "--accent"}) ${share}%, transparent)`;
}

function said(strip, i) {
  if (strip[3][i] === null) return "observed, not sampled by the policy";
  const gap = strip[1][i] === null ? "gap not known" : `gap ${strip[1][i]}`;
  return `log-probability ${strip[4][i]} · ${gap} · advantage ${strip[2][i]} · version ${strip[3][i]}`;
}

function drawn(strip) {
  const box = document.createElement("div");
  const choice = document.createElement("div");
  const legend = document.createElement("div");
  const row = document.createElement("div");
  const at = document.createElement("div");
  [box.className, choice.className, legend.className, row.className, at.className] =
    ["strip", "shades", "legend", "row", "at"];
  strip[0].forEach((text, i) => {
    if (i && strip[5].includes(i)) row.append(document.createElement("hr"));  // a new segment
    const token = document.createElement("span");
    token.textContent = texts[text];
    token.tabIndex = 0;
    token.title = said(strip, i);
    if (strip[3][i] === null) token.className = "observed";
    const show = () => { at.textContent = `${JSON.stringify(texts[text])}: ${said(strip, i)}`; };
    token.addEventListener("mouseenter", show);
    token.addEventListener("focus", show);
    row.append(token);
  });
  const known = shades.filter(([kind]) => strip[kind].some((value) => value !== null));
  function shade(kind, name) {
    const values = strip[kind].filter((value) => value !== null);
    const largest = values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
    [...row.querySelectorAll("span")].forEach((token, i) => { token.style.background = colour(kind, strip[kind][i], largest); });
    for (const b of choice.children) b.setAttribute("aria-pressed", String(b.textContent === name));
    legend.textContent = kind === 3 ? "A colour for each version."
      : `Blue above zero, red below; the strongest is ±${largest}.`;
  }
  for (const [kind, name] of known) {
    const button = document.createElement("button");
    button.textContent = name;
    button.addEventListener("click", () => shade(kind, name));
    choice.append(button);
  }
  box.append(choice, legend, row, at);
  if (known.length) shade(...known[0]);
  return box;
}

list.addEventListener("click", (event) => {
  const button = event.target.closest("button.tokens");
  if (!button) return;
  const open = button.getAttribute("aria-expanded") === "true";
  button.setAttribute("aria-expanded", String(!open));
  if (open) button.nextElementSibling.remove();
  else button.after(drawn(strips[button.dataset.strip]));
});
for (const button of buttons) {
  button.addEventListener("click", () => {
    for (const b of buttons) b.setAttribute("aria-pressed", String(b === button));
    filter();
  });
}
sort.addEventListener("change", arrange);
find.addEventListener("input", filter);
if (reason) reason.addEventListener("change", filter);

// Sorts and filters the pairs of texts.
const list = document.getElementById("pairs");
const cards = [...list.children];
const buttons = [...document.querySelectorAll("[data-show]")];
const sort = document.getElementById("sort");
const find = document.getElementById("find");
const margin = (card) => Number(card.dataset.margin);
const orders = {
  order: (a, b) => a.dataset.order - b.dataset.order,
  high: (a, b) => margin(b) - margin(a),
  low: (a, b) => margin(a) - margin(b),
  close: (a, b) => Math.abs(margin(a)) - Math.abs(margin(b)),
};

function arrange() {
  list.append(...cards.sort(orders[sort.value]));
}

function filter() {
  const outcome = buttons.find((b) => b.getAttribute("aria-pressed") === "true").dataset.show;
  const words = find.value.trim().toLowerCase();
  let shown = 0;
  for (const card of cards) {
    const visible = (outcome === "all" || card.dataset.outcome === outcome) && card.textContent.toLowerCase().includes(words);
    card.hidden = !visible;
    shown += visible;
  }
  document.getElementById("shown").textContent = shown === cards.length ? "" : `${shown} of ${cards.length}`;
}

for (const button of buttons) {
  button.addEventListener("click", () => {
    for (const b of buttons) b.setAttribute("aria-pressed", String(b === button));
    filter();
  });
}
sort.addEventListener("change", arrange);
find.addEventListener("input", filter);

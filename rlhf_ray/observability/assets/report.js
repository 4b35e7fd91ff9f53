// Draws the figures in the page's colours, and again when the reader's scheme changes between light and dark.
const figures = JSON.parse(document.getElementById("figures").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const touch = matchMedia("(pointer: coarse)");

function colour(variable) { // "var(--name)" or "var(--name/percent)"
  const [name, percent] = variable.slice("var(--".length, -1).split("/");
  const hex = getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  if (!percent) return hex;
  const rgb = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  return `rgba(${rgb.join(",")},${percent / 100})`;
}

function painted(value) {
  if (typeof value === "string") return value.startsWith("var(--") ? colour(value) : value;
  if (Array.isArray(value)) return value.map(painted);
  if (value && typeof value === "object") return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, painted(v)]));
  return value;
}

const axis = (given) => ({
  gridcolor: "var(--grid)", linecolor: "var(--line)", zerolinecolor: "var(--line)", automargin: true, exponentformat: "e", minexponent: 5,
  tickfont: { color: "var(--soft)", size: 11.5 }, ...given,
  title: { text: given.title.text, font: { color: "var(--soft)", size: 12.5 }, standoff: 10 },
});

function layout(given) {
  return painted({
    ...given,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif", color: "var(--ink)" },
    margin: { l: 12, r: 10, t: 10, b: 10 },
    xaxis: { ...axis(given.xaxis), showgrid: false, zeroline: false },
    yaxis: axis(given.yaxis),
    hovermode: given.hovermode || "x unified",
    dragmode: touch.matches ? false : "zoom", // a finger on a plot scrolls the page
    hoverlabel: { bgcolor: "var(--card)", bordercolor: "var(--line)", font: { color: "var(--ink)", size: 12 } },
    legend: { orientation: "h", yanchor: "bottom", y: 1.02, xanchor: "left", x: 0, font: { color: "var(--soft)", size: 12 } },
  });
}

function draw() {
  figures.forEach((figure, i) =>
    Plotly.react(document.getElementById("plot-" + i), painted(figure.data), layout(figure.layout), {
      responsive: true, displayModeBar: false,
    }));
}

draw();
dark.addEventListener("change", draw);

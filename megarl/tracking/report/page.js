// Draws the report from the JSON in #data. Data reaches the page as text nodes only, never as HTML.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const PAGE_ROWS = 25;
const COLORS = {
  light: ["#2f6fed", "#e8710a", "#14945a", "#a142d4", "#d93a3a", "#0b8fa8", "#b98900", "#d6418f", "#5f6b80", "#7a5230"],
  dark: ["#7aa7ff", "#ff9d4d", "#4fd08c", "#cf94f7", "#ff8078", "#4cc9de", "#e8c04a", "#ff8dc4", "#a3adbf", "#c79a74"],
};

const find = (id) => document.getElementById(id);

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// Plotly reads a few HTML tags in labels; a metric's name may hold a data source's, which is nobody's HTML.
const label = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

// ---------------------------------------------------------------- summary

function drawCards() {
  for (const card of data.cards) {
    const box = element("div", "card");
    box.append(element("div", "label", card.label), element("div", "value", card.value));
    box.append(element("div", `note ${card.tone}`, card.note));
    find("cards").append(box);
  }
  for (const [name, path] of data.files) find("files").append(`${name}: `, element("code", "", path), " ");
}

// ---------------------------------------------------------------- curves

const theme = () => ({
  colors: dark.matches ? COLORS.dark : COLORS.light,
  text: dark.matches ? "#929bad" : "#687082",
  grid: dark.matches ? "#282e3a" : "#e9ecf1",
  card: dark.matches ? "#171b24" : "#ffffff",
});

// Exponential mean that starts unbiased: weights of the past add up to one from the first point on.
function smooth(values, keep) {
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = keep * sum + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return sum / weight;
  });
}

function points(metric) {
  const values = data.metrics[metric], kept = values.map((value, index) => index).filter((index) => values[index] !== null);
  return { x: kept.map((index) => data.steps[index]), y: kept.map((index) => values[index]) };
}

function traces(chart, keep) {
  const colors = theme().colors;
  return chart.series.flatMap((series, index) => {
    const { x, y } = points(series.metric), color = colors[index % colors.length], name = label(series.label);
    if (chart.kind === "stack") return [{ type: "bar", x, y, name, marker: { color, line: { width: 0 } } }];
    const mode = chart.kind === "points" || x.length < 3 ? "lines+markers" : "lines";
    const line = { type: "scatter", mode, x, name, line: { color, width: 2 }, marker: { color, size: 7 } };
    if (!keep || chart.kind === "points") return [{ ...line, y }];
    const raw = { ...line, y, mode: "lines", opacity: 0.25, line: { color, width: 1 }, showlegend: false, hoverinfo: "skip" };
    return [raw, { ...line, y: smooth(y, keep), mode: "lines" }];
  });
}

function layout(chart) {
  const { text, grid, card } = theme();
  const axis = { gridcolor: grid, zeroline: false, linecolor: grid, tickfont: { color: text, size: 11 }, automargin: true };
  const all = chart.series.flatMap((series) => points(series.metric).y);
  const share = chart.kind === "points" && all.every((value) => value >= 0 && value <= 1);
  return {
    margin: { l: 8, r: 8, t: 8, b: 8 },
    paper_bgcolor: "transparent", plot_bgcolor: "transparent",
    font: { family: "system-ui, sans-serif", color: text, size: 12 },
    hovermode: "x unified", hoverlabel: { bgcolor: card, bordercolor: grid },
    barmode: "stack", bargap: data.steps.length > 120 ? 0 : 0.2,
    showlegend: chart.series.length > 1,
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal", font: { size: 11 } },
    xaxis: { ...axis, showgrid: false, title: { text: "step", font: { size: 11 }, standoff: 4 } },
    yaxis: { ...axis, rangemode: chart.kind === "stack" ? "tozero" : "normal", ...(share ? { range: [-0.03, 1.05] } : {}) },
  };
}

const drawn = [];

function chartCard(chart) {
  const box = element("div", chart.wide ? "chart wide" : "chart"), plot = element("div", "plot");
  box.append(element("h3", "", chart.title), element("p", "quiet", chart.note), plot);
  find("charts").append(box);
  const shown = { chart, plot, draw: () => {
    const keep = Number(find("smoothing").value);
    Plotly.react(plot, traces(shown.chart, keep), layout(shown.chart), { displayModeBar: false, responsive: true });
  } };
  drawn.push(shown);
  shown.draw();
  return { box, shown };
}

function drawCharts() {
  data.charts.forEach(chartCard);
  const names = Object.keys(data.metrics);
  if (names.length === 0) {
    find("charts").append(element("div", "chart wide empty", "No metrics were logged."));
    return;
  }
  const any = (name) => ({ title: "Any metric", note: "", kind: "line", wide: true, series: [{ metric: name, label: name }] });
  const { box, shown } = chartCard(any(names[0]));
  const choice = element("select");
  choice.setAttribute("aria-label", "Metric");
  choice.append(...names.map((name) => new Option(name, name)));
  choice.addEventListener("change", () => { shown.chart = any(choice.value); shown.draw(); });
  box.querySelector("p").replaceWith(choice);
}

// ---------------------------------------------------------------- rollouts

const rollouts = data.rollouts;
const view = { rows: [], page: 0, sort: "step", down: false, open: new Set() };

function options(select, values, all) {
  select.append(new Option(all, ""), ...[...new Set(values)].sort((a, b) => a - b || 0).map((value) => new Option(value, value)));
}

function matches(index, wanted) {
  const score = rollouts.score[index];
  if (wanted.kind && rollouts.kind[index] !== wanted.kind) return false;
  if (wanted.step && rollouts.step[index] !== Number(wanted.step)) return false;
  if (wanted.low !== "" && !(score !== null && score >= Number(wanted.low))) return false;
  if (wanted.high !== "" && !(score !== null && score <= Number(wanted.high))) return false;
  return !wanted.text || ["input", "output", "gts"].some((field) => rollouts[field][index].toLowerCase().includes(wanted.text));
}

function compare(a, b) {
  const column = rollouts[view.sort], left = column[a], right = column[b];
  if (left === right) return a - b;
  if (left === null || right === null) return left === null ? 1 : -1;
  return (left < right ? -1 : 1) * (view.down ? -1 : 1);
}

function filterRows() {
  const wanted = { text: find("search").value.toLowerCase() };
  for (const id of ["kind", "step", "low", "high"]) wanted[id] = find(id).value;
  view.rows = rollouts.step.map((_, index) => index).filter((index) => matches(index, wanted)).sort(compare);
  view.page = 0;
  drawRows();
}

function scoreText(score) {
  return score === null ? "–" : String(Number(score.toPrecision(4)));
}

function rowElement(index) {
  const row = element("tr", view.open.has(index) ? "open" : "");
  row.tabIndex = 0;
  const step = element("td", "number");
  if (rollouts.kind[index] !== "train") step.append(element("span", "tag", "val"));
  step.append(String(rollouts.step[index]));
  const score = rollouts.score[index];
  row.append(step, element("td", `number ${score > 0 ? "good" : "bad"}`, scoreText(score)));
  for (const field of ["input", "output", "gts"]) row.append(element("td", "text", rollouts[field][index]));
  if (rollouts.parts[index]) {
    const spans = rollouts.parts[index].map(([text, masked]) => element("span", masked ? "masked" : "", text));
    row.children[3].replaceChildren(...spans);
  }
  const toggle = () => {
    if (String(window.getSelection())) return; // the click ends a selection of text
    row.classList.toggle("open") ? view.open.add(index) : view.open.delete(index);
  };
  row.addEventListener("click", toggle);
  row.addEventListener("keydown", (event) => { if (event.key === "Enter") toggle(); });
  return row;
}

function drawRows() {
  const pages = Math.max(1, Math.ceil(view.rows.length / PAGE_ROWS));
  view.page = Math.min(Math.max(view.page, 0), pages - 1);
  const shown = view.rows.slice(view.page * PAGE_ROWS, (view.page + 1) * PAGE_ROWS).map(rowElement);
  if (shown.length === 0) {
    const cell = element("td", "empty", rollouts.step.length ? "Nothing matches." : "No rollouts were kept.");
    cell.colSpan = 5;
    shown.push(element("tr"));
    shown[0].append(cell);
  }
  find("rows").replaceChildren(...shown);
  find("page").textContent = `page ${view.page + 1} of ${pages}`;
  find("previous").disabled = view.page === 0;
  find("next").disabled = view.page === pages - 1;
  const left = data.rollouts_total - rollouts.step.length;
  const note = left > 0 ? `, an even choice from ${data.rollouts_total.toLocaleString("en")}` : "";
  find("count").textContent = `${view.rows.length.toLocaleString("en")} of ${rollouts.step.length.toLocaleString("en")} shown${note}`;
}

function setUpRollouts() {
  options(find("kind"), rollouts.kind, "all");
  options(find("step"), rollouts.step, "all");
  for (const id of ["search", "kind", "step", "low", "high"]) find(id).addEventListener("input", filterRows);
  for (const [id, by] of [["previous", -1], ["next", 1]]) {
    find(id).addEventListener("click", () => { view.page += by; drawRows(); });
  }
  const headers = [...document.querySelectorAll("[data-sort]")];
  const markSort = () => headers.forEach((header) => {
    if (header.dataset.sort === view.sort) header.setAttribute("aria-sort", view.down ? "descending" : "ascending");
    else header.removeAttribute("aria-sort");
  });
  headers.forEach((header) => header.addEventListener("click", () => {
    view.down = view.sort === header.dataset.sort ? !view.down : false;
    view.sort = header.dataset.sort;
    markSort();
    filterRows();
  }));
  markSort();
  filterRows();
}

// ---------------------------------------------------------------- config

function drawConfig() {
  const wanted = find("config-search").value.toLowerCase();
  const rows = data.config.filter(([key]) => key.toLowerCase().includes(wanted)).map(([key, value]) => {
    const row = element("tr");
    row.append(element("td", "", key), element("td", "", value));
    return row;
  });
  find("config-rows").replaceChildren(...rows);
}

drawCards();
setUpRollouts();
find("config-search").addEventListener("input", drawConfig);
drawConfig();
drawCharts();
const redraw = () => drawn.forEach((shown) => shown.draw());
dark.addEventListener("change", redraw);
find("smoothing").addEventListener("input", redraw);

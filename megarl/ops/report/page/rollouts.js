// The answers: search, filters, table, and the answer itself with its tokens coloured.

const PAGE_ROWS = 25;
let rollouts = null;
const FILTERS = ["search", "run", "kind", "source", "first-step", "last-step", "low", "high", "shortest", "longest"];
const rowView = { rows: [], groups: null, page: 0, sort: "step", down: true, open: new Set() };
const haystacks = [];

const haystack = (index) => (haystacks[index] ??= searchText(rollouts, index));
const distinct = (values) => [...new Set(values)];

function fillSelect(select, values, names, all) {
  select.append(new Option(all, ""), ...values.map((value, index) => new Option(names[index], value)));
  select.closest("label").hidden = values.length < 2;
}

function filterRows() {
  const value = (id) => find(id).value;
  rowView.rows = chooseRows(rollouts, {
    text: value("search"), run: value("run"), kind: value("kind"), source: value("source"),
    firstStep: value("first-step"), lastStep: value("last-step"), low: value("low"), high: value("high"),
    shortest: value("shortest"), longest: value("longest"), sort: rowView.sort, down: rowView.down,
  }, haystack, find("grouped").checked ? rowView.groups : null);
  rowView.page = 0;
  drawRows();
}

// ---------------------------------------------------------------- table

// Not the headings of groups, which are in the table's body.
const columnHeaders = () => [...document.querySelectorAll("#table thead th")];

function columnsShown() {
  const several = { run: data.runs.length > 1, source: distinct(rollouts.source).length > 1, length: rollouts.length.some((value) => value !== null), advantage: rollouts.advantage.some((value) => value !== null) };
  return columnHeaders().map((header) => header.dataset.column).filter((name) => several[name] ?? true);
}

// A cell with the name of its column, which narrow windows show in place of the table's head.
function labelledCell(name, index) {
  const cell = cellOf(name, index);
  cell.dataset.label = find("table").querySelector(`th[data-column=${name}]`).textContent;
  return cell;
}

function cellOf(name, index) {
  const value = rollouts[name][index];
  if (name === "step") {
    const cell = element("td", "number"), button = element("button", "toggle", String(value));
    button.setAttribute("aria-expanded", rowView.open.has(index));
    button.setAttribute("aria-label", `step ${value}, show the whole answer`);
    if (rollouts.kind[index] !== "train") cell.append(element("span", "tag", "val"));
    cell.append(button);
    return cell;
  }
  if (name === "score") return element("td", `number ${value > 0 ? "good" : "bad"}`, formatNumber(value));
  if (name === "advantage") return element("td", "number", formatNumber(value));
  if (name === "length") return element("td", "number", value === null ? "–" : String(value));
  if (name === "run") return element("td", "", data.runs[value].name);
  const cell = element("td", name === "source" ? "" : "text", value.slice(0, 300));
  if (name === "input") cell.append(...imageElements(rollouts.images[index]));
  if (name === "output") cell.append(...imageElements(rollouts.later_images[index]));
  return cell;
}

// Small copies of a text's images, in the order of its <image>; a text in place of one that was not kept.
function imageElements(digests) {
  if (!digests) return [];
  const box = element("div", "images");
  box.append(...digests.map((digest, number) => {
    const name = `image ${number + 1} of ${digests.length}`, source = data.thumbnails[digest];
    if (!source) return element("span", "quiet", `${name}: not kept`);
    const image = element("img");
    image.src = `data:image/webp;base64,${source}`;
    image.alt = name;
    return image;
  }));
  return [box];
}

function rowElements(index, columns) {
  const row = element("tr", rowView.open.has(index) ? "open" : "");
  row.dataset.row = index;
  row.append(...columns.map((name) => labelledCell(name, index)));
  row.addEventListener("click", () => {
    if (String(window.getSelection())) return; // the click ends a selection of text
    rowView.open.has(index) ? rowView.open.delete(index) : rowView.open.add(index);
    const had = row.contains(document.activeElement), next = row.nextSibling;
    if (next?.classList.contains("detail")) next.remove();
    const [fresh, ...detail] = rowElements(index, columns);
    row.replaceWith(fresh, ...detail);
    if (had) fresh.querySelector("button").focus();
  });
  return rowView.open.has(index) ? [row, detailRow(index, columns.length)] : [row];
}

// Heading of a group of several answers, above its first row on the page.
function groupHeading(index, before, width) {
  const group = rowView.groups.of[index];
  if (!find("grouped").checked || group.rows.length < 2 || (before !== undefined && rowView.groups.of[before] === group)) return [];
  const row = element("tr", "group-row"), cell = element("th", "", `${rollouts.input[index].trim().slice(0, 160)} `);
  cell.colSpan = width;
  cell.scope = "rowgroup";
  cell.append(element("span", "quiet", `step ${rollouts.step[index]}, ${describeGroup(group)}`), ...imageElements(rollouts.images[index]));
  row.append(cell);
  return [row];
}

function drawRows() {
  const pages = Math.max(1, Math.ceil(rowView.rows.length / PAGE_ROWS)), columns = columnsShown();
  rowView.page = Math.min(Math.max(rowView.page, 0), pages - 1);
  for (const header of columnHeaders()) header.hidden = !columns.includes(header.dataset.column);
  const shown = rowView.rows.slice(rowView.page * PAGE_ROWS, (rowView.page + 1) * PAGE_ROWS)
    .flatMap((index, at, all) => [...groupHeading(index, all[at - 1], columns.length), ...rowElements(index, columns)]);
  if (!shown.length) {
    const cell = element("td", "empty", rollouts.step.length ? "Nothing matches." : "No answers were kept.");
    cell.colSpan = columns.length;
    shown.push(element("tr"));
    shown[0].append(cell);
  }
  find("rows").replaceChildren(...shown);
  find("page").textContent = `page ${rowView.page + 1} of ${pages}`;
  find("previous").disabled = rowView.page === 0;
  find("next").disabled = rowView.page === pages - 1;
  const count = (number) => number.toLocaleString("en");
  find("count").textContent = `${count(rowView.rows.length)} of ${count(rollouts.step.length)} answers`;
}

function tellWhatIsLeftOut() {
  const notes = [], count = (number) => number.toLocaleString("en");
  if (data.rollouts_total > rollouts.step.length) {
    notes.push(`These are ${count(rollouts.step.length)} of the ${count(data.rollouts_total)} answers that the run kept: an even selection that keeps the page below ten megabytes.`);
  }
  data.runs.forEach((run, number) => {
    const kept = data.steps_with_answers[number], steps = run.metrics["critic/score/mean"]?.n ?? 0, of = data.runs.length > 1 ? `${run.name}: the` : "The";
    if (kept && kept < steps) notes.push(`${of} run kept answers of ${count(kept)} of its ${count(steps)} steps.`);
  });
  if (data.rollouts_cut) notes.push(`${count(data.rollouts_cut)} of them are long and were cut in the middle.`);
  find("left-out").textContent = notes.join(" ");
}

// ---------------------------------------------------------------- an answer

const tokenColumn = () => data.token_columns.find((column) => column.name === find("color").value);

function paint(span, column, value) {
  const strong = column ? strength(column, value) : 0;
  const side = strong > 0 ? "var(--plus)" : "var(--minus)";
  span.style.background = strong ? `color-mix(in srgb, ${side} ${Math.round(12 + 68 * Math.abs(strong))}%, transparent)` : "";
  span.classList.toggle("left-out", Boolean(column) && column.scale === "mask" && strong < 0);
}

function answerElement(index) {
  const box = element("div", "answer"), text = rollouts.output[index], coded = rollouts.tokens[index];
  box.setAttribute("role", "group");
  if (!coded) {
    const parts = rollouts.masked[index] ? maskedParts(text, rollouts.masked[index]) : [{ text, masked: false }];
    box.append(...parts.map((part) => element("span", part.masked ? "masked" : "", part.text)));
    box.setAttribute("aria-label", "Answer");
    return box;
  }
  const tokens = tokensOf(text, coded), column = tokenColumn();
  const spans = tokens.map((token, number) => {
    const span = element("span", "token", token.text || "▪");
    span.dataset.token = number;
    if (!token.text) span.classList.add("silent");
    paint(span, column, token.values[column?.name]);
    return span;
  });
  markWritten(spans, tokens, rollouts.masked[index] || []);
  box.append(...spans);
  box.tabIndex = 0;
  box.setAttribute("aria-label", `Answer, ${tokens.length} tokens; the arrow keys move between tokens`);
  followTokens(box, spans, tokens);
  return box;
}

// Tool and search output is always underlined.
function markWritten(spans, tokens, written) {
  let at = 0;
  tokens.forEach((token, number) => {
    const end = at + Array.from(token.text).length;
    if (end > at && written.some(([from, to]) => at >= from && end <= to)) spans[number].classList.add("written");
    at = end;
  });
}

function followTokens(box, spans, tokens) {
  let current = -1;
  const show = (number) => {
    if (number === current) return;
    spans[current]?.classList.remove("current");
    current = number;
    spans[number]?.classList.add("current");
    number < 0 ? hideTip() : showTip(spans[number], tokens[number], number);
  };
  box.addEventListener("mouseover", (event) => show(event.target.dataset?.token === undefined ? -1 : Number(event.target.dataset.token)));
  box.addEventListener("mouseleave", () => show(-1));
  box.addEventListener("blur", () => show(-1));
  box.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") show(-1);
    if (!by) return;
    event.preventDefault();
    show(Math.max(0, Math.min(tokens.length - 1, current + by)));
    find("spoken").textContent = find("tip").textContent;
  });
  box.addEventListener("click", (event) => event.stopPropagation());
}

function showTip(span, token, number) {
  const tip = find("tip"), list = element("dl");
  for (const column of data.token_columns) {
    if (token.values[column.name] !== undefined) {
      list.append(element("dt", "", column.label), element("dd", "", ` ${formatNumber(token.values[column.name])} `));
    }
  }
  tip.replaceChildren(element("div", "name", `token ${number + 1}: ${token.text ? JSON.stringify(token.text) : "writes nothing (a special token, or part of a letter)"} `), list);
  tip.hidden = false;
  const place = span.getBoundingClientRect(), own = tip.getBoundingClientRect();
  const top = place.bottom + own.height + 8 > window.innerHeight ? place.top - own.height - 6 : place.bottom + 6;
  tip.style.top = `${Math.max(4, top)}px`;
  tip.style.left = `${Math.max(4, Math.min(place.left, window.innerWidth - own.width - 8))}px`;
}

function hideTip() {
  find("tip").hidden = true;
}

function detailRow(index, width) {
  const row = element("tr", "detail"), cell = element("td");
  cell.colSpan = width;
  const block = (title, content) => cell.append(element("h5", "", title), content);
  block("Prompt", element("div", "plain", rollouts.input[index]));
  cell.append(...imageElements(rollouts.images[index]));
  block("Answer", answerElement(index));
  cell.append(...imageElements(rollouts.later_images[index]));
  if (rollouts.gts[index]) block("Ground truth", element("div", "plain", rollouts.gts[index]));
  const extra = Object.entries(rollouts.extra[index]);
  if (extra.length) {
    const list = element("dl", "facts");
    for (const [name, value] of extra) list.append(element("dt", "", name), element("dd", "", value));
    block("Extra values of the reward", list);
  }
  row.append(cell);
  return row;
}

// ---------------------------------------------------------------- colours

function setUpColors() {
  const select = find("color");
  select.append(new Option("nothing", ""), ...data.token_columns.map((column) => new Option(column.label, column.name)));
  select.closest(".coloring").hidden = !data.token_columns.length;
  select.value = data.token_columns[0]?.name ?? "";
  select.addEventListener("change", () => { drawLegend(); repaint(); });
  drawLegend();
}

function repaint() {
  const column = tokenColumn();
  for (const row of document.querySelectorAll("#rows tr.open")) {
    const index = Number(row.dataset.row);
    if (!rollouts.tokens[index]) continue;
    const tokens = tokensOf(rollouts.output[index], rollouts.tokens[index]);
    row.nextSibling.querySelectorAll(".token").forEach((span, number) => paint(span, column, tokens[number].values[column?.name]));
  }
}

function drawLegend() {
  const column = tokenColumn(), legend = find("legend");
  legend.replaceChildren();
  if (!column) return;
  const most = Math.max(Math.abs(column.low), Math.abs(column.high));
  const marks = { signed: [-most, 0, most], low: [column.low, column.high], high: [column.low, column.high], mask: [0, 1] }[column.scale];
  if (column.scale === "mask") {
    const sample = element("span", "swatch left-out", "not learned from");
    paint(sample, column, 0);
    legend.append(sample);
  } else {
    marks.forEach((value, number) => {
      const steps = number ? 3 : 0;
      for (let step = 1; step <= steps; step++) {
        const swatch = element("span", "swatch");
        paint(swatch, column, marks[number - 1] + (value - marks[number - 1]) * (step - 0.5) / steps);
        legend.append(swatch);
      }
      legend.append(element("span", "mark", formatNumber(value)));
    });
  }
  legend.append(element("span", "quiet", column.note));
}

// ---------------------------------------------------------------- set-up

function setUpRollouts() {
  fillSelect(find("run"), data.runs.map((_, number) => number), data.runs.map((run) => run.name), "all");
  const kinds = distinct(rollouts.kind), sources = distinct(rollouts.source).sort();
  fillSelect(find("kind"), kinds, kinds, "all");
  fillSelect(find("source"), sources, sources, "all");
  rowView.groups = groupAnswers(rollouts);
  find("grouped").addEventListener("change", filterRows);
  find("grouped").closest("label").hidden = rowView.groups.of.every((group) => group.rows.length < 2);
  let timer = 0;
  for (const id of FILTERS) find(id).addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(filterRows, 80); });
  find("clear").addEventListener("click", () => { for (const id of FILTERS) find(id).value = ""; filterRows(); });
  for (const [id, by] of [["previous", -1], ["next", 1]]) {
    find(id).addEventListener("click", () => { rowView.page += by; drawRows(); });
  }
  const headers = columnHeaders();
  const mark = () => headers.forEach((header) => {
    if (header.dataset.column !== rowView.sort) header.removeAttribute("aria-sort");
    else header.setAttribute("aria-sort", rowView.down ? "descending" : "ascending");
  });
  headers.forEach((header) => header.querySelector("button").addEventListener("click", () => {
    rowView.down = rowView.sort === header.dataset.column ? !rowView.down : false;
    rowView.sort = header.dataset.column;
    mark();
    filterRows();
  }));
  mark();
  setUpColors();
  tellWhatIsLeftOut();
  filterRows();
}

// ---------------------------------------------------------------- side by side

const side = { prompts: [], at: 0 };

function setUpSideBySide() {
  side.prompts = data.runs.length > 1 ? sharedPrompts(rollouts) : [];
  find("side").hidden = data.runs.length < 2;
  if (data.runs.length < 2) return;
  const steps = distinct(rollouts.step).sort((a, b) => a - b);
  fillSelect(find("side-step"), steps, steps.map(String), "the latest");
  find("side-step").addEventListener("input", drawSideBySide);
  find("side-search").addEventListener("input", () => { side.at = 0; drawSideBySide(); });
  for (const [id, by] of [["side-previous", -1], ["side-next", 1]]) {
    find(id).addEventListener("click", () => { side.at += by; drawSideBySide(); });
  }
  drawSideBySide();
}

function drawSideBySide() {
  const words = queryWords(find("side-search").value), step = find("side-step").value;
  const found = side.prompts.filter((prompt) => words.every((word) => prompt.input.toLowerCase().includes(word)));
  side.at = Math.max(0, Math.min(side.at, found.length - 1));
  find("side-previous").disabled = side.at === 0;
  find("side-next").disabled = side.at >= found.length - 1;
  find("side-count").textContent = found.length ? `prompt ${side.at + 1} of ${found.length}` : "No prompt has answers of two runs.";
  const prompt = found[side.at], grid = find("side-answers");
  find("side-prompt").textContent = prompt ? prompt.input : "";
  find("side-prompt").append(...imageElements(prompt?.images));
  find("side-truth").textContent = prompt?.gts ? `Ground truth: ${prompt.gts}` : "";
  grid.replaceChildren(...(prompt ? data.runs.map((run, number) => sideColumn(run, prompt, number, step)) : []));
}

function sideColumn(run, prompt, number, step) {
  const column = element("article", "side-run"), rows = prompt.answers[number] || [];
  column.append(element("h4", "", run.name));
  const chosen = rows.length ? latestAnswers(rollouts, rows, step === "" ? "" : Number(step)) : [];
  if (!chosen.length) column.append(element("p", "quiet", "no answer kept"));
  for (const index of chosen.slice(0, 4)) {
    const score = rollouts.score[index], head = element("p", "quiet", `step ${rollouts.step[index]}, reward `);
    head.append(element("b", score > 0 ? "good" : "bad", formatNumber(score)));
    column.append(head, element("div", "plain", rollouts.output[index]), ...imageElements(rollouts.later_images[index]));
  }
  return column;
}

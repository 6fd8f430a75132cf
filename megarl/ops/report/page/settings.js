// Description of runs: overview, comparison of final numbers, configuration, software.

const FINAL = [
  ["steps", "steps", 0], ["accuracy_before", "held-out accuracy, before", 0], ["accuracy_after", "held-out accuracy, after", 1],
  ["accuracy_best", "held-out accuracy, best", 1], ["reward", "reward, last tenth", 1], ["loss", "loss, last tenth", -1],
  ["kl", "KL, last tenth", 0], ["entropy", "entropy, last tenth", 0], ["length", "answer length, last tenth", 0],
  ["step_seconds", "seconds per step", -1], ["train_seconds", "seconds of training", 0],
  ["rollout_tokens_per_s", "tokens/s generated", 1], ["update_tokens_per_s", "tokens/s trained on", 1],
  ["memory_gb", "device memory, GB", -1], ["failures", "failures counted", -1],
];
const hiddenRuns = new Set();

function drawOverview() {
  const several = data.runs.length > 1, [run] = data.runs;
  find("compare").hidden = !several;
  find("single").hidden = several;
  document.querySelectorAll("[data-only=several]").forEach((part) => { part.hidden = !several; });
  if (several) { drawComparison(); return; }
  find("status").textContent = run.status;
  find("status").className = `status ${run.status.split(" ")[0]}`;
  find("verdict").textContent = run.verdict;
  for (const card of run.cards) {
    const box = element("div", "card");
    box.append(element("div", "label", card.label), element("div", "value", card.value), element("div", `note ${card.tone}`, card.note));
    find("cards").append(box);
  }
  for (const [name, value] of run.purpose) find("purpose").append(element("dt", "", name), element("dd", "", value));
  if (run.policy) find("purpose").append(element("dt", "", "Policy"), element("dd", "", run.policy));
  drawFindings(run);
}

function drawFindings(run) {
  const list = find("findings");
  for (const finding of run.findings) {
    const item = element("li", finding.level);
    item.append(element("span", "badge", finding.level === "bad" ? "problem" : "look at"), finding.text);
    if (finding.metric) {
      const button = element("button", "link", "show the curve");
      button.setAttribute("aria-label", `show the curve of ${finding.metric}`);
      button.addEventListener("click", () => showMetric(finding.metric));
      item.append(" ", button);
    }
    if (finding.reason) item.append(element("div", "quiet", finding.reason));
    list.append(item);
  }
  if (!run.findings.length) list.append(element("li", "fine", run.rows ? "No findings, and no failure was counted." : "Nothing was logged yet."));
}

// ---------------------------------------------------------------- comparison

function drawComparison() {
  const table = find("finals"), head = element("tr");
  head.append(element("th", "", "run"), ...data.runs.map((run, number) => runHeader(run, number)));
  table.append(element("thead"), element("tbody"));
  table.tHead.append(head);
  const status = element("tr");
  status.append(element("th", "", "status"), ...data.runs.map((run) => element("td", "", run.status)));
  status.firstChild.scope = "row";
  table.tBodies[0].append(status);
  for (const [key, words, better] of FINAL) {
    const values = data.runs.map((run) => run.final[key]), known = values.filter((value) => value !== undefined);
    if (!known.length) continue;
    const best = better && distinct(known).length > 1 ? (better > 0 ? Math.max(...known) : Math.min(...known)) : undefined;
    const row = element("tr"), name = element("th", "", words);
    name.scope = "row";
    row.append(name, ...values.map((value) => {
      const cell = element("td", value === best && best !== undefined ? "number best" : "number", formatNumber(value));
      if (value === best && best !== undefined) cell.title = "best";
      return cell;
    }));
    table.tBodies[0].append(row);
  }
  for (const run of data.runs) {
    for (const finding of run.findings.filter((one) => one.level === "bad")) {
      find("compare-findings").append(element("li", "bad", `${run.name}: ${finding.text}`));
    }
  }
}

function runHeader(run, number) {
  const cell = element("th", "number"), box = element("input"), text = element("label");
  cell.scope = "col";
  box.type = "checkbox";
  box.checked = true;
  box.addEventListener("change", () => { box.checked ? hiddenRuns.delete(number) : hiddenRuns.add(number); redraw(); });
  const dot = element("span", "dot");
  dot.dataset.run = number;
  text.append(box, dot, run.name);
  text.title = run.folder;
  cell.append(text);
  return cell;
}

function colorRuns() {
  const colors = theme().colors;
  document.querySelectorAll(".dot").forEach((dot) => { dot.style.background = colors[dot.dataset.run % colors.length]; });
}

// ---------------------------------------------------------------- configuration

function configKinds() {
  const several = data.runs.length > 1, known = data.config.some((row) => row.origins.some(Boolean));
  const kinds = several ? [["differ", "differences between the runs"]] : [];
  if (known) kinds.push(["changed", "differences from the defaults"], ["command", "set on the command line"]);
  return [...kinds, ["all", "everything"]];
}

function isConfigShown(row, kind) {
  if (kind === "differ") return new Set(row.values).size > 1;
  if (kind === "changed") return row.origins.some(Boolean);
  if (kind === "command") return row.origins.includes("command line");
  return true;
}

function drawConfig() {
  const words = queryWords(find("config-search").value), kind = find("config-kind").value;
  const rows = data.config.filter((row) => isConfigShown(row, kind) && words.every((word) => `${row.key} ${row.values.join(" ")}`.toLowerCase().includes(word)));
  const known = data.config.some((row) => row.origins.some(Boolean)), several = data.runs.length > 1;
  const head = element("tr");
  const titles = ["key", ...(several ? data.runs.map((run) => run.name) : ["value"]), ...(known ? ["default"] : []), ...(known && !several ? ["set by"] : [])];
  head.append(...titles.map((title) => element("th", "", title)));
  find("config-head").replaceChildren(head);
  find("config-rows").replaceChildren(...rows.map((row) => {
    const line = element("tr", row.origins.some(Boolean) ? "changed" : "");
    line.append(element("td", "", row.key), ...row.values.map((value) => element("td", "value", value === null ? "–" : value)));
    if (known) line.append(element("td", "quiet", row.default ?? (several ? "" : row.values[0])));
    if (known && !several) line.append(element("td", "quiet", row.origins[0] || "default"));
    [...line.cells].slice(1).forEach((cell, number) => { cell.dataset.label = titles[number + 1]; });
    return line;
  }));
  find("config-count").textContent = `${rows.length} of ${data.config.length} keys`;
}

function setUpSettings() {
  for (const [value, words] of configKinds()) find("config-kind").append(new Option(words, value));
  for (const id of ["config-search", "config-kind"]) find(id).addEventListener("input", drawConfig);
  drawConfig();
  find("environment-rows").append(...data.environment.map((row) => {
    const line = element("tr"), name = element("th", "", row.key);
    name.scope = "row";
    line.append(name, ...row.values.map((value) => element("td", new Set(row.values).size > 1 ? "value different" : "value", value ?? "–")));
    if (data.runs.length > 1) [...line.cells].slice(1).forEach((cell, number) => { cell.dataset.label = data.runs[number].name; });
    return line;
  }));
}

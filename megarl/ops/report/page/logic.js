// Computations of the page, without a document: pure functions, tested separately.
"use strict";

// ---------------------------------------------------------------- numbers

function formatNumber(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return String(Number(value.toPrecision(size >= 1000 ? 6 : 4)));
}

function formatSeconds(seconds) {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${String(Math.floor(seconds % 60)).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

// ---------------------------------------------------------------- curves

// Exponential mean without the bias of its start: weights sum to one from the first point on.
function smooth(values, keep) {
  let sum = 0, weight = 0;
  return values.map((value) => {
    sum = keep * sum + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return sum / weight;
  });
}

// Seconds of training at the end of a step, interpolated between the steps of the clock.
function secondsAt(clock, step) {
  const { steps, seconds } = clock;
  let low = 0, high = steps.length - 1;
  if (high < 0) return null;
  if (step <= steps[0]) return seconds[0];
  if (step >= steps[high]) return seconds[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle; else high = middle;
  }
  const share = (step - steps[low]) / (steps[high] - steps[low]);
  return seconds[low] + share * (seconds[high] - seconds[low]);
}

// Curve of a run over the requested x axis; null if the run lacks the metric or has no finite value.
function curveOf(run, metric, axis) {
  const curve = run.metrics[metric];
  if (!curve || curve.y.length === 0) return null;
  const steps = run.axes[curve.x];
  const x = axis === "time" ? steps.map((step) => secondsAt(run.clock, step) / 3600) : steps;
  return { ...curve, x, steps };
}

function describeCurve(label, curve) {
  const { y, steps } = curve, low = Math.min(...(curve.low || y)), high = Math.max(...(curve.high || y));
  const first = formatNumber(y[0]), last = formatNumber(y[y.length - 1]);
  return `${label}: from ${first} at step ${steps[0]} to ${last} at step ${steps[steps.length - 1]}, ` +
    `between ${formatNumber(low)} and ${formatNumber(high)}`;
}

// Settings of a value axis. Without negative values it starts at or above 0, even if all values are equal. An axis of shares
// ends at 1, or at the largest value if that is below 0.3.
function valueAxis(curves, isShare) {
  const values = curves.flatMap((curve) => [...curve.y, ...(curve.low || []), ...(curve.high || [])]);
  const low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  if (!values.length || low < 0) return { rangemode: "normal" };
  if (!isShare || high > 1) return { rangemode: "nonnegative" };
  const top = high > 0 && high < 0.3 ? high : 1;
  return { range: [-0.03 * top, 1.05 * top] };
}

// Settings of an axis of whole numbers, such as ranks: no label between two of them, and at most about eight labels.
function wholeAxis(low, high) {
  const raw = Math.max(1, (high - low) / 8), scale = 10 ** Math.floor(Math.log10(raw));
  const dtick = [1, 2, 5, 10].map((step) => step * scale).find((step) => step >= raw);
  return { tickmode: "linear", tick0: 0, dtick, tickformat: "d" };
}

// Row of a step's busiest rank in a map of ranks over steps.
const busiestRow = (map, at) => map.load.reduce((best, row, number) => (row[at] > map.load[best][at] ? number : best), 0);

const ranksOf = (map, row) => (map.each > 1 ? `busiest of the ranks from ${map.ranks[row]}` : `rank ${map.ranks[row]}`);

function describeLoad(map, row, at) {
  const load = map.load[row][at], mean = map.mean[at];
  return `step ${map.steps[at]}, ${ranksOf(map, row)}: ${formatNumber(load * mean)}, ${formatNumber(load)} of the mean`;
}

function describeRanks(map) {
  const busiest = (at) => map.load[busiestRow(map, at)][at];
  const worst = map.steps.reduce((best, _, at) => (busiest(at) > busiest(best) ? at : best), 0);
  return `Most at ${describeLoad(map, busiestRow(map, worst), worst)}`;
}

// ---------------------------------------------------------------- tokens

const DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

// The 16-bit words of a base64 text, little-endian.
function wordsOf(text) {
  const bytes = [];
  let held = 0, bits = 0;
  for (const letter of text) {
    if (letter === "=") break;
    held = ((held << 6) | DIGITS.indexOf(letter)) & 0xffffff;
    bits += 6;
    if (bits >= 8) {
      bits -= 8;
      bytes.push((held >> bits) & 255);
    }
  }
  return Array.from({ length: bytes.length >> 1 }, (_, index) => bytes[2 * index] | (bytes[2 * index + 1] << 8));
}

// An IEEE half-precision number.
function halfFloat(word) {
  const sign = word & 0x8000 ? -1 : 1, exponent = (word >> 10) & 31, fraction = word & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

// The tokens of an answer: {text, values: {name: number}}; characters are counted as code points.
function tokensOf(text, coded) {
  const letters = Array.from(text), counts = wordsOf(coded.characters);
  const columns = Object.entries(coded).filter(([name]) => name !== "characters")
    .map(([name, values]) => [name, wordsOf(values).map(halfFloat)]);
  let at = 0;
  return counts.map((count, index) => {
    const values = {};
    for (const [name, column] of columns) {
      const value = column[column.length === 1 ? 0 : index];
      if (!Number.isNaN(value)) values[name] = value;
    }
    at += count;
    return { text: letters.slice(at - count, at).join(""), values };
  });
}

// Text split at the borders of tool output: {text, masked}.
function maskedParts(text, spans) {
  const letters = Array.from(text), parts = [];
  let at = 0;
  for (const [begin, end] of spans) {
    parts.push({ text: letters.slice(at, begin).join(""), masked: false });
    parts.push({ text: letters.slice(begin, end).join(""), masked: true });
    at = end;
  }
  parts.push({ text: letters.slice(at).join(""), masked: false });
  return parts.filter((part) => part.text);
}

// Colour strength of a value, -1 to 1; the sign is the side of a two-sided scale. 0 = no colour.
function strength(column, value) {
  if (value === undefined || Number.isNaN(value)) return 0;
  const clip = (number) => Math.max(-1, Math.min(1, number));
  if (column.scale === "signed") {
    const most = Math.max(Math.abs(column.low), Math.abs(column.high));
    return most ? clip(value / most) : Math.sign(value);
  }
  if (column.scale === "mask") return value === 0 ? -1 : 0;
  const span = column.high - column.low;
  if (!(span > 0)) return 0;
  const share = Math.max(0, Math.min(1, (value - column.low) / span));
  return column.scale === "low" ? share - 1 : share;
}

// ---------------------------------------------------------------- answers

const SEARCHED = ["input", "output", "gts", "source"];

// The rows to show, as indices, in order. `wanted`: text (all its words, or a "phrase"), run, kind, source, step, low, high,
// shortest, longest, masked, sort, down; "" or missing means no filter. With groups (of groupAnswers), the answers of a prompt
// are adjacent; among equals, the group with the lowest mean reward comes first.
function chooseRows(rollouts, wanted, haystack, groups) {
  const words = queryWords(wanted.text || "");
  const within = (value, low, high) =>
    (!isGiven(low) || (value !== null && value >= Number(low))) && (!isGiven(high) || (value !== null && value <= Number(high)));
  const chosen = [];
  for (let index = 0; index < rollouts.step.length; index++) {
    if (isGiven(wanted.run) && rollouts.run[index] !== Number(wanted.run)) continue;
    if (isGiven(wanted.kind) && rollouts.kind[index] !== wanted.kind) continue;
    if (isGiven(wanted.source) && rollouts.source[index] !== wanted.source) continue;
    if (!within(rollouts.step[index], wanted.firstStep, wanted.lastStep)) continue;
    if (!within(rollouts.score[index], wanted.low, wanted.high)) continue;
    if (!within(rollouts.length[index], wanted.shortest, wanted.longest)) continue;
    if (words.length && !words.every((word) => haystack(index).includes(word))) continue;
    chosen.push(index);
  }
  const column = rollouts[wanted.sort || "step"], sign = wanted.down ? -1 : 1;
  if (!groups) return chosen.sort((a, b) => compareValues(column[a], column[b], sign) || a - b);
  const mean = (index) => groups.of[index].mean, score = rollouts.score;
  chosen.sort((a, b) => compareValues(column[a], column[b], sign) || compareValues(mean(a), mean(b), 1) || compareValues(score[a], score[b], 1) || a - b);
  const gathered = new Map();
  for (const index of chosen) gathered.set(groups.of[index], [...(gathered.get(groups.of[index]) || []), index]);
  return [...gathered.values()].flat();
}

// Groups of answers, those of a run to a prompt at a step: {of: group of each row}, a group is {rows, mean, deviation}.
// Mean and standard deviation are those of the rewards; null without any.
function groupAnswers(rollouts) {
  const groups = new Map(), of = rollouts.input.map((input, index) => {
    const key = JSON.stringify([rollouts.run[index], rollouts.kind[index], rollouts.step[index], input, rollouts.images[index]]);
    if (!groups.has(key)) groups.set(key, { rows: [], mean: null, deviation: null });
    groups.get(key).rows.push(index);
    return groups.get(key);
  });
  for (const group of groups.values()) {
    const scores = group.rows.map((index) => rollouts.score[index]).filter((score) => score !== null);
    if (!scores.length) continue;
    group.mean = scores.reduce((sum, score) => sum + score, 0) / scores.length;
    group.deviation = Math.sqrt(scores.reduce((sum, score) => sum + (score - group.mean) ** 2, 0) / Math.max(1, scores.length - 1));
  }
  return { of };
}

function describeGroup(group) {
  const count = group.rows.length === 1 ? "1 answer" : `${group.rows.length} answers`;
  if (group.mean === null) return `${count}, none with a reward`;
  const spread = group.deviation > 0 ? `mean reward ${formatNumber(group.mean)}, standard deviation ${formatNumber(group.deviation)}` : `all with reward ${formatNumber(group.mean)}`;
  return `${count}, ${spread}`;
}

const isGiven = (value) => value !== undefined && value !== null && value !== "";

// Words of a search, lower case; a quoted phrase is one word.
function queryWords(text) {
  return (text.toLowerCase().match(/"[^"]*"?|\S+/g) || []).map((word) => word.replace(/"/g, "")).filter(Boolean);
}

// Missing values come last in both sort orders.
function compareValues(left, right, sign) {
  if (left === right) return 0;
  if (left === null || right === null) return left === null ? 1 : -1;
  return (left < right ? -1 : 1) * sign;
}

function searchText(rollouts, index) {
  return SEARCHED.map((field) => rollouts[field][index]).join("\n").toLowerCase();
}

// Prompts with answers of two runs or more: {kind, input, images, gts, answers: [row indices by run]}, the widest shared first.
function sharedPrompts(rollouts) {
  const prompts = new Map();
  rollouts.input.forEach((input, index) => {
    const images = rollouts.images[index], key = JSON.stringify([rollouts.kind[index], input, images]);
    if (!prompts.has(key)) prompts.set(key, { kind: rollouts.kind[index], input, images, gts: rollouts.gts[index], answers: {} });
    const answers = prompts.get(key).answers, run = rollouts.run[index];
    (answers[run] = answers[run] || []).push(index);
  });
  const shared = [...prompts.values()].filter((prompt) => Object.keys(prompt.answers).length > 1);
  const width = (prompt) => Object.keys(prompt.answers).length;
  return shared.sort((a, b) => width(b) - width(a) || (a.kind < b.kind ? 1 : a.kind > b.kind ? -1 : 0));
}

// Answers of a run to a prompt at the latest step up to `step`.
function latestAnswers(rollouts, rows, step) {
  const before = rows.filter((index) => !isGiven(step) || rollouts.step[index] <= step);
  const last = Math.max(...before.map((index) => rollouts.step[index]));
  return before.filter((index) => rollouts.step[index] === last);
}

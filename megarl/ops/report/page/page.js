// Opens the page. Data reaches it as text nodes only, never as HTML.

const find = (id) => document.getElementById(id);
const darkSystem = window.matchMedia("(prefers-color-scheme: dark)");
let chosenTheme = "auto";
const isDark = () => chosenTheme === "dark" || (chosenTheme === "auto" && darkSystem.matches);

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function showTheme() {
  document.documentElement.dataset.theme = isDark() ? "dark" : "light";
  find("theme").textContent = `theme: ${chosenTheme}`;
  colorRuns();
  redraw();
}

function setUpTheme() {
  const order = ["auto", "light", "dark"];
  find("theme").addEventListener("click", () => {
    chosenTheme = order[(order.indexOf(chosenTheme) + 1) % order.length];
    showTheme();
  });
  darkSystem.addEventListener("change", showTheme);
  showTheme();
}

// "/" focuses the search; the browser handles the other keys.
function setUpKeys() {
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.key === "Escape") hideTip();
    if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    find("search").focus();
  });
  window.addEventListener("scroll", hideTip, { passive: true });
}

async function unpack(id) {
  const bytes = Uint8Array.from(atob(find(id).textContent), (letter) => letter.charCodeAt(0));
  find(id).remove();
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}

let data = null;

async function openPage() {
  if (!window.DecompressionStream) throw new Error("this browser is too old: it has no DecompressionStream (all have since 2023)");
  data = JSON.parse(await unpack("data"));
  rollouts = data.rollouts;
  drawOverview();
  setUpCurves();
  setUpRollouts();
  setUpSideBySide();
  setUpSettings();
  setUpTheme();
  setUpKeys();
  document.documentElement.dataset.ready = "page";
  const plotly = element("script");
  plotly.textContent = await unpack("plotly");
  document.head.append(plotly);
  if (!window.Plotly) throw new Error("the charts' script does not run");
  redraw();
  find("js-plotly-tester")?.setAttribute("aria-hidden", "true"); // Plotly measures texts in it
  document.documentElement.dataset.ready = "charts";
}

openPage().catch((error) => {
  find("notice").textContent = `The page cannot be shown: ${error.message}`;
  find("notice").hidden = false;
  console.error(error);
});

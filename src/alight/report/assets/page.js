// What is chosen, network, methods, budget and theme, and what is drawn again then.

function fillFacts() {
  const {network} = state;
  find("facts").textContent = [
    network.name,
    network.numExits ? count(network.numExits, "exit") : "",
    `full network: ${cost(network.fullCost, network)} per sample` +
      (network.full ? `, accuracy ${exact(network.full.accuracy)}` : ""),
    network.note,
  ]
    .filter(Boolean)
    .join(" · ");
  for (const [part, text] of Object.entries({caution: network.caution, verdict: network.verdict})) {
    find(part).textContent = text;
    (part === "verdict" ? find("verdict-part") : find(part)).hidden = !text;
  }
}

function fillSwitches() {
  const rows = d3
    .select("#switches")
    .selectAll("label")
    .data(
      [...methods, ...references].filter((method) => state.network.bySpent.has(method)),
      (method) => method,
    )
    .join((enter) => {
      const row = enter.append("label").attr("class", (method) => (references.includes(method) ? "reference" : null));
      row
        .append("input")
        .attr("type", "checkbox")
        .attr("value", (method) => method);
      row.append((method) => swatch(looks.get(method)));
      row.append((method) => breakable(label(method)));
      row.on("pointerenter focusin", (event, method) => emphasise(shown.has(method) ? looks.get(method).name : null));
      row.on("pointerleave focusout", () => emphasise(null));
      return row;
    })
    .order();
  rows
    .select("input")
    .property("checked", (method) => shown.has(method))
    .on("change", (event, method) => {
      if (event.target.checked) shown.add(method);
      else shown.delete(method);
      drawMethods();
    });
}

function fillChoice() {
  const candidates = [...methods, oracle].filter((method) => state.network.bySpent.has(method));
  if (!candidates.includes(state.method)) state.method = state.network.chosen?.method ?? candidates[0] ?? null;
  d3.select("#method")
    .selectAll("option")
    .data(candidates)
    .join("option")
    .attr("value", (method) => method)
    .property("selected", (method) => method === state.method)
    .text(label);
}

function fillBudgets() {
  const {budgets} = state.network;
  const slider = find("budget");
  slider.max = Math.max(0, budgets.length - 1);
  slider.disabled = budgets.length < 2;
  slider.value = Math.max(
    0,
    d3.minIndex(budgets, (allowed) => Math.abs(allowed - state.allowed)),
  );
  takeBudget();
}

/** The budget where the slider stands. */
function takeBudget() {
  const {network} = state;
  state.allowed = network.budgets[find("budget").value] ?? 1;
  const words = `${percent(state.allowed)} of the full network`;
  find("budget").setAttribute("aria-valuetext", words);
  find("allowed").textContent = `${words} · ${cost(state.allowed * network.fullCost, network)}`;
}

/** Figures and tables of all methods that are switched on. */
function drawMethods() {
  drawComparison();
  drawReadout();
  drawSpending();
  drawOverspending();
}

/** What is said of the chosen method at the chosen budget. */
function drawChosen() {
  drawNumbers();
  drawLine();
  drawGuarantees();
  drawReadout();
  drawShares();
}

function drawAll() {
  drawAccuracy();
  drawChosen();
  drawMethods();
  drawRisk();
}

function changeBudget() {
  takeBudget();
  for (const id of lines.keys()) moveLine(id);
  drawChosen();
}

function chooseMethod(method) {
  state.method = method;
  find("method").value = method;
  drawAccuracy();
  drawChosen();
}

function changeNetwork() {
  state.network = networks[find("network").value || 0];
  const {chosen} = state.network;
  if (chosen) Object.assign(state, {method: chosen.method, allowed: chosen.allowed});
  fillFacts();
  fillSwitches();
  fillChoice();
  fillBudgets();
  offerPoints("download", state.network.points, columns);
  find("examples-csv").hidden = !state.network.examples;
  for (const id of ["compare-section", "readout-section", "table-section"]) find(id).hidden = !state.network.several;
  drawPlan();
  drawCalibration();
  drawTable();
  drawAll();
}

function switchAll(on) {
  for (const method of [...methods, ...references]) {
    if (on) shown.add(method);
    else shown.delete(method);
  }
  fillSwitches();
  drawMethods();
}

const themes = {"": "system", light: "light", dark: "dark"};
function changeTheme() {
  const names = Object.keys(themes);
  const theme = names[(names.indexOf(document.documentElement.dataset.theme ?? "") + 1) % names.length];
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  find("theme-name").textContent = themes[theme];
}

find("network-field").hidden = networks.length < 2;
d3.select("#network")
  .on("change", changeNetwork)
  .selectAll("option")
  .data(networks)
  .join("option")
  .attr("value", (_, index) => index)
  .text((network) => network.name);
d3.select("#all").on("click", () => switchAll(true));
d3.select("#none").on("click", () => switchAll(false));
d3.select("#method").on("change", (event) => chooseMethod(event.target.value));
d3.select("#budget").on("input", changeBudget);
d3.select("#theme").on("click", changeTheme);

changeNetwork();

let width = document.documentElement.clientWidth;
addEventListener("resize", () => {
  if (width === document.documentElement.clientWidth) return; // a phone's address bar comes and goes
  width = document.documentElement.clientWidth;
  drawAll();
});

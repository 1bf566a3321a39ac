// The figures, drawn by Observable Plot, and the budget's line through them.

const margins = {marginTop: 28, marginRight: 18, marginLeft: 44, marginBottom: 40};

function draw(id, words, options) {
  const place = find(id);
  const width = Math.max(240, place.clientWidth);
  const plot = Plot.plot({
    width,
    ...margins,
    ...options(width),
    ariaLabel: words,
    style: {fontFamily: "inherit", fontSize: "12px", background: "transparent", color: "inherit"},
  });
  plot.setAttribute("role", "img");
  place.replaceChildren(plot);
  return plot;
}

/** Methods at the chosen budget, as rings on their curves, and the budget itself as a line: moved without a redraw. */
const lines = new Map();

function drawWithLine(id, words, options, chosen, {x, y}) {
  lines.set(id, {plot: draw(id, words, options), chosen: chosen.filter((method) => method !== singleExit), x, y});
  moveLine(id);
}

function moveLine(id) {
  const {plot, chosen, x, y} = lines.get(id);
  const [acrossScale, upScale] = [plot.scale("x"), plot.scale("y")];
  const across = acrossScale.apply(state.allowed);
  const [bottom, top] = upScale.range;
  const place = d3.select(plot).selectAll("g.budget-line").data([null]).join("g").attr("class", "budget-line");
  place.attr("pointer-events", "none").attr("aria-hidden", "true");
  place
    .selectAll("line")
    .data([across])
    .join("line")
    .attr("x1", across)
    .attr("x2", across)
    .attr("y1", bottom)
    .attr("y2", top);
  const late = across > (acrossScale.range[0] + acrossScale.range[1]) / 2;
  place
    .selectAll("text")
    .data([`${percent(state.allowed)} allowed`])
    .join("text")
    .attr("x", across + (late ? -6 : 6))
    .attr("y", bottom - 8)
    .attr("text-anchor", late ? "end" : "start")
    .text((words) => words);
  const points = chosen.map((method) => nearest(state.network, method, state.allowed));
  place
    .selectAll("circle")
    .data(points.filter((point) => !elsewhere(point, state.allowed)))
    .join("circle")
    .attr("r", 6)
    .attr("stroke", (point) => looks.get(point.method).color)
    .attr("cx", (point) => acrossScale.apply(x(point)))
    .attr("cy", (point) => upScale.apply(y(point)));
}

function note(id, words) {
  lines.delete(id);
  find(id).replaceChildren(Object.assign(document.createElement("p"), {className: "note", textContent: words}));
}

const calm = {
  fontSize: 12,
  lineHeight: 1.3,
  lineWidth: 40,
  textPadding: 9,
  stroke: "var(--muted)",
  strokeOpacity: 0.5,
  maxRadius: 36,
};

/** What the pointed-at row says: beside it, or in the figure's corner where the screen is too narrow for that. */
function tip(width, rows, {x, y, title, corner = "bottom-right", pointer = Plot.pointer}) {
  if (width >= 480) return Plot.tip(rows, pointer({...calm, x, y, title}));
  return Plot.tip(rows, pointer({...calm, px: x, py: y, title, frameAnchor: corner, anchor: corner, pointerSize: 0}));
}

const ring = (rows, x, y) =>
  Plot.dot(rows, Plot.pointer({x, y, r: 6.5, stroke: "var(--ink)", maxRadius: calm.maxRadius}));
const axes = (x, y, axisX = Plot.axisX) => [
  Plot.gridY({ticks: y.ticks, stroke: "var(--line)", strokeOpacity: 1}),
  Plot.axisY({tickSize: 0, tickPadding: 8, color: "var(--muted)", labelArrow: "none", ...y}),
  axisX({
    anchor: "bottom",
    tickSize: 0,
    tickPadding: 8,
    color: "var(--muted)",
    labelArrow: "none",
    labelAnchor: "right",
    ...x,
  }),
];

/** Line, points and shaded interval of one method. */
function series(width, method, points, {x, y, low, high}) {
  const {color, symbol, dash, name} = looks.get(method);
  const className = `series ${name}`;
  const marks = [];
  if (method !== singleExit) {
    marks.push(Plot.areaY(points, {x, y1: low, y2: high, fill: color, fillOpacity: 0.14, className}));
    marks.push(Plot.line(points, {x, y, stroke: color, strokeWidth: 1.75, strokeDasharray: dash, className}));
  }
  if (symbol === "times")
    marks.push(Plot.dot(points, {x, y, stroke: color, symbol, r: width < 480 ? 3 : 4, strokeWidth: 1.5, className}));
  else if (symbol)
    marks.push(
      Plot.dot(points, {
        x,
        y,
        fill: color,
        stroke: "var(--paper)",
        strokeWidth: 0.75,
        symbol,
        r: width < 480 ? 2.8 : 3.6,
        className,
      }),
    );
  return marks;
}

const tall = (width, ratio, low, high) => Math.round(Math.min(high, Math.max(low, width * ratio)));
const everyTenth = (width) => {
  const [low, high] = state.network.range;
  const step = Math.max(0.1, d3.tickStep(low, high, width < 420 ? 5 : 10));
  return {
    ticks: d3.range(Math.ceil(low / step - 1e-9), high / step + 1e-9).map((tick) => tick * step),
    tickFormat: whole,
  };
};
/** Names of exits where all of them fit, else numbers of as many as fit. */
const exitTicks = (width, exits) => {
  const longest = d3.max(exits, (exit) => state.network.exitName(exit).length);
  if (width / exits.length > 7 * longest + 8) return state.network.exitName;
  const few = Math.ceil((22 * exits.length) / width); // a number needs this many pixels
  return (exit) => (exit % few ? "" : `${exit + 1}`);
};

// What a curve shows of its points.
const figured = columns.filter((name) => !/^exit_|^thresholds$|^rule$|^guarantee$/.test(name));

/** The chosen policy, on the curve of its method. */
function chosenMark(x, y) {
  const {chosen} = state.network;
  const look = {symbol: "diamond", r: 9, fill: "var(--ink)", stroke: "var(--paper)", strokeWidth: 1.5};
  return chosen ? [Plot.dot([chosen], {x, y, ...look, className: "chosen-policy"})] : [];
}

/** The most accurate exit that each cost allows, as corners of a staircase up to the right end. */
function bestSingleExits() {
  const stairs = [];
  for (const point of state.network.alone)
    if (!stairs.length || point.accuracy > stairs.at(-1).accuracy) stairs.push(point);
  return stairs.length ? [...stairs, {...stairs.at(-1), spent: state.network.range[1]}] : [];
}

const exitLabel = (point) => state.network.exitName(point.exit);

const quietName = {textAnchor: "start", fill: "var(--muted)", stroke: "var(--paper)", strokeWidth: 4};

/** The accuracy of the full network above its line, at the end that is farther from the curve. */
function fullName(curve) {
  const {full, range} = state.network;
  if (!full) return [];
  const gap = (point) => (point ? Math.abs(point.accuracy - full.accuracy) : Infinity);
  const reaches = (point) => point && point.spent > d3.mean(range);
  const [left, right] = [gap(curve[0]), reaches(curve.at(-1)) ? gap(curve.at(-1)) : Infinity];
  const place =
    left < right ? {x: range[1], dx: -10, textAnchor: "end"} : {x: range[0], dx: 18, textAnchor: "start"};
  return [
    Plot.text([full], {...quietName, ...place, y: "accuracy", dy: -9, text: [`full network ${exact(full.accuracy)}`]}),
  ];
}

/** What the chosen method is measured against: the full network, a smaller one, each exit alone. */
function baselines(width) {
  const {alone, full, smaller, fullCost, range} = state.network;
  const quiet = {stroke: "var(--muted)", strokeWidth: 1.25};
  const across = smaller && [smaller.cost / fullCost, range[1]].map((spent) => ({spent, accuracy: smaller.accuracy}));
  return [
    Plot.line(bestSingleExits(), {x: "spent", y: "accuracy", curve: "step-after", ...quiet, strokeDasharray: "2 3"}),
    Plot.dot(alone, {x: "spent", y: "accuracy", symbol: "times", r: 4, stroke: "var(--muted)", strokeWidth: 1.5}),
    ...(width < 600 || alone.length > 6 || d3.max(alone, (point) => exitLabel(point).length) > 12
      ? []
      : [
          Plot.text(alone.slice(0, -1), {
            ...quietName,
            x: "spent",
            y: "accuracy",
            text: exitLabel,
            dx: 8,
            dy: 11,
            fontSize: 11,
          }),
        ]),
    ...(full ? [Plot.ruleY([full.accuracy], {stroke: "var(--ink)", strokeWidth: 1.25, strokeDasharray: "7 3"})] : []),
    ...(smaller
      ? [
          Plot.line(across, {x: "spent", y: "accuracy", stroke: "var(--series-1)", strokeWidth: 1.5}),
          Plot.dot([across[0]], {x: "spent", y: "accuracy", fill: "var(--series-1)", r: 4.5}),
        ]
      : []),
  ];
}

/** The method whose curve is drawn: that of the policy, or the first of several budgets where it has just its own. */
function curvedMethod() {
  const {network, method} = state;
  const curved = (each) => !references.includes(each) && network.bySpent.get(each)?.length > 1;
  return [method, ...network.bySpent.keys()].find(curved) ?? method;
}

/** The figure's parts, as far as there are any, beside its title; the full network has its name on its line. */
function fillKey() {
  const {network} = state;
  const curved = curvedMethod();
  const other = network.chosen && network.chosen.method !== curved ? `, ${network.chosen.method}` : "";
  const parts = [
    [curved, looks.get(curved)],
    ...(network.smaller ? [[network.smaller.name, {color: "var(--series-1)", symbol: "circle"}]] : []),
    ...(network.alone.length ? [["best single exit", {color: "var(--muted)", dash: "2 3"}]] : []),
    ...(network.chosen ? [[`chosen policy${other}`, {color: "var(--ink)", symbol: "diamond", bare: true}]] : []),
  ];
  const key = d3.select("#accuracy-key").html("").selectAll("span").data(parts).join("span");
  key.append(([, look]) => swatch(look));
  key.append("b").text(([name]) => label(name));
}

function drawAccuracy() {
  const {network} = state;
  const method = curvedMethod();
  const curve = network.bySpent.get(method) ?? [];
  const points = [...curve, ...network.alone, ...(network.chosen ? [network.chosen] : [])];
  offerPoints("accuracy-csv", points, figured);
  if (method) fillKey();
  if (!method) return note("accuracy", "These points have no methods beside single exits.");
  const where = {x: "spent", y: "accuracy", low: "accuracy_low", high: "accuracy_high"};
  const {chosen} = network;
  const options = (width) => ({
    height: tall(width, 0.32, 270, 290),
    x: {domain: network.range},
    y: {nice: true, zero: false, insetBottom: 14}, // for the name of the lowest exit
    marks: [
      ...axes(
        {...everyTenth(width), label: "cost per sample, share of the full network"},
        {ticks: 5, tickFormat: tick, label: "accuracy"},
      ),
      ...baselines(width),
      ...series(width, method, curve, where),
      ...fullName(curve),
      ...chosenMark("spent", "accuracy"),
      ring(points, "spent", "accuracy"),
      tip(width, points, {x: "spent", y: "accuracy", title: describe}),
    ],
  });
  const words = [
    `Accuracy against cost: ${named([method])}`,
    chosen ? `chosen policy ${exact(chosen.accuracy)} at ${exact(chosen.spent)}` : "",
    network.full ? `full network ${exact(network.full.accuracy)}` : "",
    network.smaller ? `${network.smaller.name} ${exact(network.smaller.accuracy)}` : "",
  ];
  drawWithLine("accuracy", words.filter(Boolean).join(", "), options, [method], {
    x: (point) => point.spent,
    y: (point) => point.accuracy,
  });
}

function drawComparison() {
  const chosen = drawn();
  const points = chosen.flatMap((method) => state.network.bySpent.get(method));
  offerPoints("compare-csv", points, figured);
  if (find("compare-section").hidden) return;
  if (!chosen.length) return note("compare", "No method is switched on.");
  const where = {x: "spent", y: "accuracy", low: "accuracy_low", high: "accuracy_high"};
  const options = (width) => ({
    height: tall(width, 0.5, 320, 460),
    x: {domain: state.network.range},
    y: {nice: true, zero: false},
    marks: [
      ...axes(
        {...everyTenth(width), label: "cost per sample, share of the full network"},
        {ticks: 8, tickFormat: tick, label: "accuracy"},
      ),
      ...[...chosen].reverse().flatMap((method) => series(width, method, state.network.bySpent.get(method), where)),
      ...chosenMark("spent", "accuracy"),
      ring(points, "spent", "accuracy"),
      tip(width, points, {x: "spent", y: "accuracy", title: describe}),
    ],
  });
  drawWithLine("compare", `Accuracy against cost of all methods: ${named(chosen)}`, options, chosen, {
    x: (point) => point.spent,
    y: (point) => point.accuracy,
  });
}

function drawSpending() {
  const chosen = drawn(...(state.network.several ? [singleExit] : references)); // else no switch says which is which
  const points = chosen.flatMap((method) => state.network.byAllowed.get(method));
  offerPoints("spending-csv", points, figured);
  if (!chosen.length) return note("spending", "No method is switched on.");
  const [low, high] = state.network.range;
  const options = (width) => {
    const height = tall(width, 0.8, 280, 380);
    const rise = height - margins.marginTop - margins.marginBottom;
    const slope = (Math.atan2(rise, width - margins.marginLeft - margins.marginRight) * 180) / Math.PI;
    return {
      height,
      x: {domain: [low, high]},
      y: {domain: [low, high]},
      marks: [
        ...axes(
          {...everyTenth(width), label: "allowed, share of the full network"},
          {...everyTenth(width), label: "spent"},
        ),
        Plot.line(
          [
            [low, low],
            [high, high],
          ],
          {stroke: "var(--muted)"},
        ),
        Plot.text([[d3.interpolate(low, high)(0.3), d3.interpolate(low, high)(0.3)]], {
          text: ["all of it spent"],
          rotate: -slope,
          dy: -15,
          fill: "var(--muted)",
        }),
        ...[...chosen].reverse().flatMap((method) =>
          series(width, method, state.network.byAllowed.get(method), {
            x: "allowed",
            y: "spent",
            low: "spentLow",
            high: "spentHigh",
          }),
        ),
        ...chosenMark("allowed", "spent"),
        ring(points, "allowed", "spent"),
        tip(width, points, {x: "allowed", y: "spent", title: describe}),
      ],
    };
  };
  drawWithLine("spending", `Spent against allowed budget: ${named(chosen)}`, options, chosen, {
    x: (point) => point.allowed,
    y: (point) => point.spent,
  });
}

function drawOverspending() {
  const chosen = drawn(...references);
  if (!chosen.length) return note("overspending", "No method is switched on.");
  const points = chosen.flatMap((method) => state.network.bySpent.get(method));
  const over = (point) => point.spent - point.allowed;
  const where = {
    x: "allowed",
    y: over,
    low: (point) => point.spentLow - point.allowed,
    high: (point) => point.spentHigh - point.allowed,
  };
  const ends = points.flatMap((point) => [over(point), where.low(point), where.high(point)]).filter(Number.isFinite);
  const options = (width) => ({
    height: tall(width, 0.8, 280, 380),
    x: {domain: state.network.range},
    y: {domain: [Math.min(-0.01, d3.min(ends)), Math.max(0.01, d3.max(ends))], nice: true},
    marks: [
      ...axes(
        {...everyTenth(width), label: "allowed, share of the full network"},
        {
          ticks: 6,
          tickFormat: (share) => (Math.abs(share) < 1e-9 ? "0" : signed(share)),
          label: "spent minus allowed, in percentage points",
        },
      ),
      Plot.ruleY([0], {stroke: "var(--muted)"}),
      ...[...chosen].reverse().flatMap((method) => series(width, method, state.network.byAllowed.get(method), where)),
      ...chosenMark("allowed", over),
      ring(points, "allowed", over),
      tip(width, points, {
        x: "allowed",
        y: over,
        title: (point) =>
          [
            ...spending(point),
            `difference  ${signed(over(point))}${interval(where.low(point), where.high(point), signed)}`,
          ].join("\n"),
      }),
    ],
  });
  drawWithLine("overspending", `Spent minus allowed budget: ${named(chosen)}`, options, chosen, {
    x: (point) => point.allowed,
    y: over,
  });
}

function drawShares() {
  const point = nearest(state.network, state.method, state.allowed);
  fillDetails(point);
  if (!point) return note("shares", "These points have no methods beside single exits.");
  if (!point.exit_shares.length) return note("shares", "This point does not say how many samples left at each exit.");
  const planned = point.exit_rates.length > 0;
  const kinds = planned ? ["planned", "observed"] : ["observed"];
  const rows = kinds.flatMap((kind) =>
    Array.from(kind === "planned" ? point.exit_rates : point.exit_shares, (share, exit) => ({kind, exit, share})),
  );
  const color = looks.get(point.method).color;
  const bar = {fx: "exit", x: "kind", y: "share"};
  const both = (exit) => rows.filter((row) => row.exit === exit).map((row) => `${row.kind}  ${exact(row.share)}`);
  draw(
    "shares",
    `Share of samples per exit, ${kinds.join(" and ")}: ${label(point.method)} at ${percent(point.allowed)} allowed`,
    (width) => ({
      height: tall(width, 0.55, 280, 340),
      marginTop: 32,
      marginBottom: 56,
      fx: {domain: d3.range(point.exit_shares.length), label: "exit", padding: 0, axis: null},
      x: {domain: kinds, axis: null, paddingInner: 0.1, paddingOuter: 0.3},
      y: {domain: [0, 1]},
      marks: [
        ...axes(
          {label: "exit", labelOffset: 40, tickFormat: exitTicks(width, d3.range(point.exit_shares.length))},
          {ticks: 5, tickFormat: tick, label: "share of samples"},
          Plot.axisFx,
        ),
        Plot.barY(
          rows.filter((row) => row.kind === "planned"),
          {...bar, fill: color, fillOpacity: 0.12, stroke: color, strokeWidth: 1.5, inset: 0.75},
        ),
        Plot.barY(
          rows.filter((row) => row.kind === "observed"),
          {...bar, fill: color},
        ),
        ...(width / rows.length < 26
          ? []
          : [
              Plot.text(rows, {
                ...bar,
                text: (row) => (row.share < 0.005 ? "" : Math.round(100 * row.share)),
                dy: -8,
                fill: "var(--muted)",
                fontSize: 11,
              }),
            ]),
        Plot.ruleY([0], {stroke: "var(--muted)"}),
        Plot.tip(
          rows,
          Plot.pointerX({
            ...calm,
            ...bar,
            title: (row) => [state.network.exitName(row.exit), ...both(row.exit)].join("\n"),
          }),
        ),
      ],
    }),
  );
  if (planned) {
    const key = d3.create("div").attr("class", "key").style("--key", color);
    key
      .selectAll("span")
      .data(kinds)
      .join("span")
      .attr("class", (kind) => (kind === "observed" ? "full" : null))
      .text((kind) => kind)
      .each(function () {
        this.prepend(document.createElement("i"));
      });
    find("shares").prepend(key.node());
  }
}

function drawRisk() {
  const rows = d3.sort(state.network.alone, (point) => point.exit);
  offerPoints("risk-csv", rows, ["exit", ...figured]);
  if (!rows.length) return note("risk", "These points have no single exits: sweep with references to see them.");
  const costs = new Map(rows.map((point) => [point.exit, point]));
  const errorLow = (point) => 1 - point.accuracy_high;
  const errorHigh = (point) => 1 - point.accuracy_low;
  draw("risk", `Error rate of each exit alone${state.network.name && ` on ${state.network.name}`}`, (width) => ({
    height: tall(width, 0.95, 260, 380),
    marginBottom: 56,
    x: {domain: rows.map((point) => point.exit), padding: 0.22},
    y: {domain: [0, d3.max(rows, (point) => d3.max([1 - point.accuracy, errorHigh(point)]))], nice: true},
    marks: [
      ...axes(
        {
          label: "exit, and its cost as the only exit, share of the full network",
          tickFormat: (exit) =>
            [
              exitTicks(width, [...costs.keys()])(exit),
              width / rows.length < 40 ? "" : whole(costs.get(exit).spent),
            ].join("\n"),
        },
        {ticks: 5, tickFormat: tick, label: "error rate"},
      ),
      Plot.barY(rows, {x: "exit", y: (point) => 1 - point.accuracy, fill: "var(--bar)"}),
      Plot.ruleX(rows, {x: "exit", y1: errorLow, y2: errorHigh, stroke: "var(--ink)", strokeWidth: 1.5}),
      Plot.ruleY([0], {stroke: "var(--muted)"}),
      tip(width, rows, {
        x: "exit",
        y: (point) => 1 - point.accuracy,
        title: (point) =>
          [
            state.network.exitName(point.exit),
            `error  ${exact(1 - point.accuracy)}${interval(errorLow(point), errorHigh(point), exact)}`,
            `cost as the only exit  ${amountOf(point.spent, point.mean_cost, point.network)}`,
          ].join("\n"),
        corner: "top-right",
        pointer: Plot.pointerX,
      }),
    ],
  }));
}

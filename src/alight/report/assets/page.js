"use strict";
(() => {
  const {networks, spends, columns, oracle, singleExit} = JSON.parse(document.getElementById("data").textContent);
  const find = (id) => document.getElementById(id);
  const references = [oracle, singleExit];
  const label = (method) => (method === singleExit ? "each exit alone" : method);

  // ---- What is there to draw -------------------------------------------------------------------------------------

  for (const network of networks) {
    for (const point of network.points) {
      for (const column of columns) point[column] ??= NaN; // JSON has no NaN and says null
      point.network = network;
      point.allowed = point.budget / network.plainCost;
      point.spent = point.mean_cost / network.plainCost;
      point.spentLow = point.mean_cost_low / network.plainCost;
      point.spentHigh = point.mean_cost_high / network.plainCost;
    }
    network.bySpent = d3.group(
      d3.sort(network.points, (point) => point.spent),
      (point) => point.method,
    );
    network.byAllowed = d3.group(
      d3.sort(network.points, (point) => point.allowed),
      (point) => point.method,
    );
    network.alone = network.bySpent.get(singleExit) ?? [];
    network.alone.forEach((point, rank) => {
      point.exit = point.exit_shares.length ? d3.maxIndex(point.exit_shares) : rank;
    });
    const amounts = network.points.flatMap((point) => [point.allowed, point.spent]);
    network.range = [Math.floor(d3.min(amounts) * 10) / 10, Math.max(1, d3.max(amounts))];
  }

  // Two of the paper's own and two it is compared with: what can be read at a glance when there are many.
  const favourites = ["eero", "eero_marginal", "geometric", "patience"];
  const present = new Set(networks.flatMap((network) => network.points.map((point) => point.method)));
  const own = [...present].filter((method) => !references.includes(method));
  const first = favourites.filter((method) => present.has(method));
  const methods = [...first, ...own.filter((method) => !first.includes(method))];
  const shown = new Set([
    ...(methods.length <= 6 ? methods : first.length ? first : methods.slice(0, 4)),
    ...references,
  ]);

  // A method keeps its looks in every figure; colour, symbol and dash all tell it apart.
  const symbols = ["circle", "square", "triangle", "diamond", "star", "wye", "hexagon"];
  const shapes = {
    circle: d3.symbolCircle,
    square: d3.symbolSquare,
    triangle: d3.symbolTriangle,
    diamond: d3.symbolDiamond,
    star: d3.symbolStar,
    wye: d3.symbolWye,
    times: d3.symbolTimes,
  };
  const dashes = [null, "7 3", "2 3", "9 3 2 3"];
  const looks = new Map(
    methods.map((method, index) => {
      const round = Math.floor(index / 7);
      return [
        method,
        {
          color: `var(--series-${index % 7})`,
          symbol: symbols[(index + round * 3) % 7],
          dash: dashes[round % 4],
          name: `m${index}`,
        },
      ];
    }),
  );
  looks.set(oracle, {color: "var(--ink)", symbol: null, dash: "5 4", name: "oracle"});
  looks.set(singleExit, {color: "var(--ink)", symbol: "times", dash: null, name: "alone"});

  const state = {network: networks[0], method: null, budget: 0.5};

  // ---- Words and numbers -----------------------------------------------------------------------------------------

  const percent = d3.format(".1~%");
  const exact = d3.format(".1%");
  const whole = d3.format(".0%");
  const signed = (share) => d3.format("+.2~f")(100 * share);
  const cost = (value, network) => {
    if (network.unit !== "" && !/^(FLOPs|MACs)$/.test(network.unit))
      return `${d3.format(".3~r")(value)} ${network.unit}`;
    const [, digits, prefix] = /^(.*?)([a-zA-Zµ]?)$/.exec(d3.format(value < 1 ? ".3~r" : ".3~s")(value));
    return `${digits} ${prefix}${network.unit}`.trim();
  };
  const interval = (low, high, format) =>
    Number.isFinite(low) && Number.isFinite(high) ? ` (${format(low)} to ${format(high)})` : "";
  const accuracyOf = (point) => `${exact(point.accuracy)}${interval(point.accuracy_low, point.accuracy_high, exact)}`;
  const amountOf = (share, value, point) => `${percent(share)}, ${cost(value, point.network)}`;
  // A name that may wrap after its underscores.
  const breakable = (name) => {
    const span = document.createElement("span");
    span.append(...name.split(/(?<=_)/).flatMap((part) => [part, document.createElement("wbr")]));
    return span;
  };
  const count = (number, noun) => `${number} ${noun}${number === 1 ? "" : "s"}`;

  const spending = (point) =>
    point.method === singleExit
      ? [`exit ${point.exit} alone`, `spent  ${amountOf(point.spent, point.mean_cost, point)}`]
      : [
          label(point.method),
          `allowed  ${amountOf(point.allowed, point.budget, point)}`,
          `spent  ${amountOf(point.spent, point.mean_cost, point)}`,
        ];
  const describe = (point) => [...spending(point), `accuracy  ${accuracyOf(point)}`].join("\n");

  // ---- Drawing ---------------------------------------------------------------------------------------------------

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
  }

  function note(id, words) {
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

  const drawn = (...without) =>
    [...methods, ...references].filter(
      (method) => shown.has(method) && !without.includes(method) && state.network.bySpent.has(method),
    );
  const named = (chosen) => `${chosen.map(label).join(", ")}${state.network.name && ` on ${state.network.name}`}`;
  const tall = (width, ratio, low, high) => Math.round(Math.min(high, Math.max(low, width * ratio)));
  const everyTenth = (width) => {
    const [low, high] = state.network.range;
    const step = Math.max(0.1, d3.tickStep(low, high, width < 420 ? 5 : 10));
    return {
      ticks: d3.range(Math.ceil(low / step - 1e-9), high / step + 1e-9).map((tick) => tick * step),
      tickFormat: whole,
    };
  };
  const everyFew = (width, exits) => {
    const few = Math.ceil((22 * exits) / width); // a number needs this many pixels
    return (exit) => (exit % few ? "" : `${exit}`);
  };

  function drawAccuracy() {
    const chosen = drawn();
    if (!chosen.length) return note("accuracy", "No method is switched on.");
    const points = chosen.flatMap((method) => state.network.bySpent.get(method));
    const where = {
      x: "spent",
      y: "accuracy",
      low: "accuracy_low",
      high: "accuracy_high",
    };
    draw("accuracy", `Accuracy against budget spent: ${named(chosen)}`, (width) => ({
      height: tall(width, 0.56, 320, 500),
      x: {domain: state.network.range},
      y: {nice: true, zero: false},
      marks: [
        ...axes(
          {...everyTenth(width), label: "spent, share of the plain network"},
          {ticks: 8, tickFormat: whole, label: "accuracy"},
        ),
        ...[...chosen].reverse().flatMap((method) => series(width, method, state.network.bySpent.get(method), where)),
        ring(points, "spent", "accuracy"),
        tip(width, points, {x: "spent", y: "accuracy", title: describe}),
      ],
    }));
  }

  function drawSpending() {
    const chosen = drawn(singleExit);
    if (!chosen.length) return note("spending", "No method is switched on.");
    const points = chosen.flatMap((method) => state.network.bySpent.get(method));
    const [low, high] = state.network.range;
    draw("spending", `Spent against allowed budget: ${named(chosen)}`, (width) => {
      const height = tall(width, 0.8, 280, 380);
      const rise = height - margins.marginTop - margins.marginBottom;
      const slope = (Math.atan2(rise, width - margins.marginLeft - margins.marginRight) * 180) / Math.PI;
      return {
        height,
        x: {domain: [low, high]},
        y: {domain: [low, high]},
        marks: [
          ...axes(
            {...everyTenth(width), label: "allowed, share of the plain network"},
            {...everyTenth(width), label: "spent"},
          ),
          Plot.line(
            [
              [low, low],
              [high, high],
            ],
            {stroke: "var(--muted)"},
          ),
          Plot.text([[d3.interpolate(low, high)(0.7), d3.interpolate(low, high)(0.7)]], {
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
          ring(points, "allowed", "spent"),
          tip(width, points, {x: "allowed", y: "spent", title: describe}),
        ],
      };
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
    draw("overspending", `Spent minus allowed budget: ${named(chosen)}`, (width) => ({
      height: tall(width, 0.8, 280, 380),
      x: {domain: state.network.range},
      y: {domain: [Math.min(-0.01, d3.min(ends)), Math.max(0.01, d3.max(ends))], nice: true},
      marks: [
        ...axes(
          {...everyTenth(width), label: "allowed, share of the plain network"},
          {
            ticks: 6,
            tickFormat: (share) => (Math.abs(share) < 1e-9 ? "0" : signed(share)),
            label: "spent minus allowed, in percentage points",
          },
        ),
        Plot.ruleY([0], {stroke: "var(--muted)"}),
        ...[...chosen].reverse().flatMap((method) => series(width, method, state.network.byAllowed.get(method), where)),
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
    }));
  }

  function drawShares() {
    const point = state.network.byAllowed.get(state.method)?.[find("budget").value];
    if (!point) {
      find("chosen").replaceChildren();
      return note("shares", "These points have no methods beside single exits.");
    }
    const planned = point.exit_rates.length > 0;
    find("budget").setAttribute("aria-valuetext", `${percent(point.allowed)} of the plain network`);
    if (!point.exit_shares.length) {
      find("chosen").replaceChildren();
      return note("shares", "This point does not say how many samples left at each exit.");
    }
    find("chosen").textContent = [
      `${label(point.method)} with ${amountOf(point.allowed, point.budget, point)} allowed:`,
      `${percent(point.spent)} spent, ${exact(point.accuracy)} right.`,
      planned ? "" : "It plans no rates, so only observed shares are drawn.",
    ].join(" ");

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
            {label: "exit", labelOffset: 40, tickFormat: everyFew(width, point.exit_shares.length)},
            {ticks: 5, tickFormat: whole, label: "share of samples"},
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
            Plot.pointerX({...calm, ...bar, title: (row) => [`exit ${row.exit}`, ...both(row.exit)].join("\n")}),
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
    const rows = state.network.alone;
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
          width / rows.length < 40
            ? {label: "exit", tickFormat: everyFew(width, rows.length)}
            : {
                label: "exit, and its cost as share of the plain network",
                tickFormat: (exit) => `${exit}\n${whole(costs.get(exit).spent)}`,
              },
          {ticks: 5, tickFormat: whole, label: "error rate"},
        ),
        Plot.barY(rows, {x: "exit", y: (point) => 1 - point.accuracy, fill: "var(--bar)"}),
        Plot.ruleX(rows, {x: "exit", y1: errorLow, y2: errorHigh, stroke: "var(--ink)", strokeWidth: 1.5}),
        Plot.ruleY([0], {stroke: "var(--muted)"}),
        tip(width, rows, {
          x: "exit",
          y: (point) => 1 - point.accuracy,
          title: (point) =>
            [
              `exit ${point.exit}`,
              `error  ${exact(1 - point.accuracy)}${interval(errorLow(point), errorHigh(point), exact)}`,
              `cost  ${amountOf(point.spent, point.mean_cost, point)}`,
            ].join("\n"),
          corner: "top-right",
          pointer: Plot.pointerX,
        }),
      ],
    }));
  }

  function drawTable() {
    const number = d3.format(".1f");
    const table = d3.select("#table").html("");
    const head = table.append("thead").append("tr");
    head.append("th").attr("scope", "col").text("method");
    head.selectAll("th.spend").data(spends).join("th").attr("class", "spend").attr("scope", "col").text(whole);
    const rank = (row) => [...methods, ...references].indexOf(row.method);
    const rows = d3.sort(state.network.table, rank);
    for (const [name, part] of [
      ["", rows.filter((row) => row.method !== oracle)],
      ["reference", rows.filter((row) => row.method === oracle)],
    ]) {
      const body = table.append("tbody").attr("class", name).selectAll("tr").data(part).join("tr");
      body
        .append("th")
        .attr("scope", "row")
        .append((row) => breakable(label(row.method)));
      body
        .selectAll("td")
        .data((row) => row.cells)
        .join("td")
        .each(function (cell) {
          const place = d3.select(this);
          if (cell === null) return void place.attr("class", "absent").text("–");
          place.append(cell.best ? "strong" : "span").text(number(100 * cell.accuracy));
          if (cell.low !== null && cell.high !== null)
            place.append("small").text(`${number(100 * cell.low)}–${number(100 * cell.high)}`);
        });
    }
  }

  // ---- Choosing --------------------------------------------------------------------------------------------------

  function fillFacts() {
    const {network} = state;
    const last = network.alone.at(-1);
    const exits = d3.max(network.points, (point) => point.exit_shares.length);
    const used = methods.filter((method) => network.bySpent.has(method));
    find("facts").textContent = [
      network.name,
      exits ? count(exits, "exit") : "",
      count(used.length, "method"),
      count(new Set(used.flatMap((method) => network.bySpent.get(method).map((point) => point.budget))).size, "budget"),
      `the plain network costs ${cost(network.plainCost, network)} per sample` +
        (last ? ` and is right ${exact(last.accuracy)} of the time` : ""),
    ]
      .filter(Boolean)
      .join(" · ");
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
        row.append("input").attr("type", "checkbox");
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

  function swatch({color, symbol, dash}) {
    const svg = d3.create("svg").attr("width", 30).attr("height", 12).attr("aria-hidden", "true");
    if (symbol !== "times")
      svg
        .append("line")
        .attr("x2", 30)
        .attr("y1", 6)
        .attr("y2", 6)
        .attr("stroke", color)
        .attr("stroke-width", 1.75)
        .attr("stroke-dasharray", dash);
    if (symbol) {
      const path = shapes[symbol]
        ? d3.symbol(shapes[symbol], 40)()
        : d3
            .line()
            .x((corner) => 4 * Math.sin((corner * Math.PI) / 3))
            .y((corner) => 4 * Math.cos((corner * Math.PI) / 3))(d3.range(7));
      svg
        .append("path")
        .attr("d", path)
        .attr("transform", "translate(15,6)")
        .attr(symbol === "times" ? "stroke" : "fill", color)
        .attr("stroke-width", symbol === "times" ? 1.5 : 0);
    }
    return svg.node();
  }

  function emphasise(name) {
    d3.selectAll("figure svg .series").classed("faint", function () {
      return name !== null && !this.classList.contains(name);
    });
  }

  function fillChoice() {
    const candidates = [...methods, oracle].filter((method) => state.network.bySpent.has(method));
    if (!candidates.includes(state.method)) state.method = candidates[0] ?? null;
    d3.select("#method")
      .selectAll("option")
      .data(candidates)
      .join("option")
      .attr("value", (method) => method)
      .property("selected", (method) => method === state.method)
      .text(label);
    fillBudgets();
  }

  function fillBudgets() {
    const points = state.network.byAllowed.get(state.method) ?? [];
    const slider = find("budget");
    slider.max = Math.max(0, points.length - 1);
    slider.value = Math.max(
      0,
      d3.minIndex(points, (point) => Math.abs(point.allowed - state.budget)),
    );
    slider.disabled = points.length < 2;
  }

  function fillDownload() {
    const {network} = state;
    const cell = (value) => (Number.isNaN(value) ? "nan" : Array.isArray(value) ? value.join(" ") : value);
    const text = d3.csvFormatRows([
      columns,
      ...network.points.map((point) => columns.map((column) => cell(point[column]))),
    ]);
    const name = [document.title, network.name]
      .join(" ")
      .toLowerCase()
      .replace(/[^\p{L}\p{N}]+/gu, "-")
      .replace(/^-|-$/g, "");
    d3.select("#download")
      .attr("download", `${name || "points"}.csv`)
      .attr("href", `data:text/csv;charset=utf-8,${encodeURIComponent(`${text}\n`)}`);
  }

  function drawMethods() {
    drawAccuracy();
    drawSpending();
    drawOverspending();
  }

  function drawAll() {
    drawMethods();
    drawShares();
    drawRisk();
  }

  function changeNetwork() {
    state.network = networks[find("network").value || 0];
    fillFacts();
    fillSwitches();
    fillChoice();
    fillDownload();
    drawTable();
    drawAll();
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
  d3.select("#method").on("change", (event) => {
    state.method = event.target.value;
    fillBudgets();
    drawShares();
  });
  d3.select("#budget").on("input", (event) => {
    state.budget = state.network.byAllowed.get(state.method)[event.target.value].allowed;
    drawShares();
  });

  function switchAll(on) {
    for (const method of [...methods, ...references]) {
      if (on) shown.add(method);
      else shown.delete(method);
    }
    fillSwitches();
    drawMethods();
  }

  changeNetwork();

  let width = document.documentElement.clientWidth;
  addEventListener("resize", () => {
    if (width === document.documentElement.clientWidth) return; // a phone's address bar comes and goes
    width = document.documentElement.clientWidth;
    drawAll();
  });
})();

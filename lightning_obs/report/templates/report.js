"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { layers, poor, lost } = data;
  const byName = new Map(layers.map((row) => [row.name, row]));
  const known = (value) => value !== undefined && value !== null && value !== "";
  const short = (v) => (!known(v) ? "not known" : Math.abs(v) >= 1e4 ? Math.round(v).toLocaleString("en") : String(Number(v.toPrecision(4))));
  const size = (bytes) => {
    const at = bytes < 1024 ? 0 : Math.min(3, Math.floor(Math.log2(bytes) / 10));
    const value = bytes / 1024 ** at, digits = at === 0 ? 0 : at > 2 || value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
    return `${value.toFixed(digits)} ${["B", "KiB", "MiB", "GiB"][at]}`;
  };

  // ------------------------------------------------------------------ elements
  function filled(made, attributes, children) {
    for (const [key, value] of Object.entries(attributes)) if (value !== false) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }
  const element = (name, attributes = {}, ...children) => filled(document.createElement(name), attributes, children);
  const drawn = (name, attributes = {}, ...children) =>
    filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
  // a line may end behind a dot, a slash, a parenthesis or an equals sign, but not before a number
  const breakable = (name) => name.split(/(?<=[./(=])(?!\d)/).flatMap((part) => [part, document.createElement("wbr")]);

  // ------------------------------------------------------------------ axes
  function ticks(low, high, count) {
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
    const first = Math.ceil(low / step - 1e-9), found = [];
    for (let n = first; n * step <= high + step * 1e-6; n++) found.push(Number((n * step).toPrecision(12)));
    return found;
  }
  // An empty plot: what x and y become in it, and the drawing. `x`, `y`: [low, high]; `log`: of y
  function plot(width, height, label, { x, y, xlabel, ylabel, log = false, format = short, yticks }) {
    const svg = drawn("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
    const right = width - 12, top = 10, bottom = height - 36, place = log ? (v) => Math.log10(v) : (v) => v, range = y.map(place);
    const powers = log && range[1] - range[0] >= 1.2;
    const marks = yticks ?? (powers ? ticks(Math.ceil(range[0]), Math.floor(range[1]), 4).filter(Number.isInteger).map((v) => 10 ** v)
      : log ? ticks(y[0], y[1], 4) : ticks(range[0], range[1], 4));
    const left = 26 + 6.5 * Math.max(...marks.map((value) => format(value).length));
    const of = (value, [low, high], from, to) => from + ((value - low) / (high - low || 1)) * (to - from);
    const X = (v) => of(v, x, left, right), Y = (v) => of(place(v), range, bottom, top);
    for (const value of marks) {
      svg.append(drawn("line", { x1: left, x2: right, y1: Y(value), y2: Y(value), class: "grid" }));
      svg.append(drawn("text", { x: left - 5, y: Y(value) + 4, "text-anchor": "end" }, format(value)));
    }
    for (const value of ticks(x[0], x[1], Math.max(2, Math.floor((right - left) / 75)))) {
      svg.append(drawn("line", { x1: X(value), x2: X(value), y1: bottom, y2: bottom + 4, class: "axis" }));
      svg.append(drawn("text", { x: X(value), y: bottom + 15, "text-anchor": "middle" }, short(value)));
    }
    svg.append(drawn("line", { x1: left, x2: right, y1: bottom, y2: bottom, class: "axis" }));
    svg.append(drawn("text", { x: (left + right) / 2, y: height - 4, "text-anchor": "middle" }, xlabel));
    const turned = `rotate(-90 11 ${(top + bottom) / 2})`;
    svg.append(drawn("text", { x: 11, y: (top + bottom) / 2, "text-anchor": "middle", transform: turned }, ylabel));
    return { svg, X, Y, left, right, top, bottom };
  }
  const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
  const around = (values, share = 0.08, least = 0) => { // `least`: span, as a share of the largest
    const low = Math.min(...values), high = Math.max(...values), more = Math.max((high - low || Math.abs(high) || 1) * share, (high * least - high + low) / 2);
    return [low - more, high + more];
  };
  function dot(picture, x, y, shape, name, at = [7, -5]) {
    const spot = [picture.X(x), picture.Y(y)];
    const mark = shape === "chosen-mark"
      ? drawn("path", { d: path([[spot[0], spot[1] - 7], [spot[0] + 7, spot[1]], [spot[0], spot[1] + 7], [spot[0] - 7, spot[1]]]) + "Z", class: shape })
      : drawn("circle", { cx: spot[0], cy: spot[1], r: shape === "ring" ? 6 : 4, class: shape });
    mark.append(drawn("title", {}, `${name} ${short(x)}, ${short(y)}`));
    picture.svg.append(mark);
    const ends = at[0] < 0 ? spot[0] > picture.left + 70 : spot[0] > picture.right - 90;
    const text = { x: spot[0] + (ends ? -9 : at[0]), y: spot[1] + at[1], "text-anchor": ends ? "end" : "start", class: shape.includes("mark") && shape !== "plain-mark" ? "strong" : "" };
    if (name) picture.svg.append(drawn("text", text, name));
  }

  // ------------------------------------------------------------------ figures, drawn as wide as there is room
  const drawings = [];
  function figure(title, make, note) {
    const place = element("div"), made = element("figure", {}, element("figcaption", {}, title), place);
    if (note) made.append(element("p", { class: "note" }, note));
    const pictures = document.getElementById("pictures");
    pictures.insertBefore(made, pictures.querySelector(".engines"));
    drawings.push(() => place.replaceChildren(...[make(Math.max(240, place.clientWidth || 460))].flat()));
  }
  const colour = (i) => `var(--c${i % 8})`;
  const legend = (names) => element("div", { class: "legend" },
    ...names.map((name, i) => element("span", {}, element("i", { style: `background:${colour(i)}` }), name)));
  const bar = (share, i, title = "") => element("i", { title, style: `width:${100 * share}%;background:${colour(i)}` });

  // Lengths of bars as shares of the longest. Logarithmic where that one is 20 times the next and would hide them
  function lengths(values) {
    const above = values.filter((value) => value > 0).sort((a, b) => b - a), [most, next] = above, least = above.at(-1);
    if (above.length < 3 || most <= 20 * next) return { of: (value) => value / (most || 1), note: "" };
    const range = Math.log(most / least);
    return { of: (value) => (value > 0 ? 0.05 + 0.95 * (Math.log(value / least) / range) : 0), note: "The lengths of the bars are logarithmic." };
  }

  // ------------------------------------------------------------------ where a layer stands: depth and kind
  const inOrder = [...layers].sort((a, b) => (a.at ?? 1e9) - (b.at ?? 1e9));
  const numbersOf = (name) => name.split(".").filter((part) => /^\d+$/.test(part)).map(Number);
  const firsts = new Set(layers.map((row) => numbersOf(row.name)[0]).filter(known));
  const twice = layers.filter((row) => numbersOf(row.name).length > 1 && !row.name.includes("experts"));
  const level = firsts.size <= 6 && twice.length > layers.length / 2 ? 2 : 1;
  for (const row of layers) {
    let seen = 0;
    const parts = row.name.split(".").map((part) => (/^\d+$/.test(part) ? (seen++ < level ? "\u2217" : "n") : part));
    const numbers = numbersOf(row.name).slice(0, level);
    row.depth = numbers.length ? numbers.join(".") : null;
    row.kind = numbers.length ? parts.join(".") : row.name;
  }
  const deep = inOrder.filter((row) => known(row.depth));
  const depths = [...new Set(deep.map((row) => row.depth))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  // each kind at one depth would be a diagonal
  const isStrip = depths.length < 2 || deep.length < layers.length / 2 || new Set(deep.map((row) => row.kind)).size === deep.length;
  const kinds = isStrip ? [] : [...new Set(deep.map((row) => row.kind))];
  const common = kinds.reduce((a, b) => { while (!b.startsWith(a)) a = a.slice(0, -1); return a; }, kinds[0] ?? "");
  const cut = common.lastIndexOf("\u2217.") + 2;
  const kindName = (kind) => (cut > 1 ? kind.slice(cut) : kind).replaceAll("\u2217.", "");

  // ------------------------------------------------------------------ the map
  // mixed in oklab between two ends: always lighter or always darker, so that colour-blind people can tell values apart
  const ramps = { more: ["--least", "--most"], large: ["--small", "--large"] };
  const mixture = (ramp, share) => `color-mix(in oklab, var(${ramps[ramp][1]}) ${(100 * share).toFixed(0)}%, var(${ramps[ramp][0]}))`;
  const largest = (key) => Math.max(...layers.map((row) => row[key] ?? 0)) || 1;
  const modes = [
    { key: "sqnr", title: "SQNR [dB]", ramp: "more", at: (v) => 1 - v / 40, ends: ["0 dB", `below ${poor} dB (mark): more than 3 % noise`, "40 dB"], mark: poor / 40, text: (v) => `${v.toFixed(1)} dB`, cell: (v) => v.toFixed(0), worst: (v) => -v },
    { key: "share", title: `share of the ${lost}`, ramp: "more", at: (v) => Math.sqrt(v / largest("share")), ends: ["0 %", "", `${short(largest("share"))} %`], text: (v) => `${v.toFixed(1)} % of the ${lost}`, cell: (v) => (v < 0.5 ? "" : v.toFixed(0)) },
    { key: "sensitivity", title: "sensitivity", ramp: "more", at: (v) => Math.sqrt(Math.max(0, v) / largest("sensitivity")), ends: ["0", data.sensitivity_unit, short(largest("sensitivity"))], text: short, cell: () => "" },
    { key: "choice", title: "choice" },
    { key: "weight_width", title: "weight bits", text: (v) => `${v} bit weights` },
    { key: "input_width", title: "input bits", text: (v) => `${v} bit inputs` },
    { key: "weight_observer", title: "weight observer" },
    { key: "input_observer", title: "input observer" },
    { key: "clipped", title: "clipped", ramp: "more", at: (v) => Math.sqrt(v / largest("clipped")), ends: ["0 %", "", `${short(largest("clipped"))} %`], text: (v) => `${v.toFixed(2)} % clipped`, cell: (v) => (v < 0.05 ? "" : v.toFixed(1)) },
    { key: "after", title: "bytes", ramp: "large", at: (v) => v / largest("after"), ends: ["0", "", size(largest("after"))], text: size, cell: () => "" },
  ].filter(({ key }, i, all) => layers.some((row) => known(row[key])) || (!i && !all.some((other) => layers.some((row) => known(row[other.key])))));
  const decided = [`${data.scores[0]?.of}_observer`, "choice"].map((wanted) => modes.find(({ key }) => key === wanted));
  let mode = decided.find(Boolean) ?? modes[0], current = null;

  function cellOf(rows) {
    const worst = mode.worst ?? ((v) => (typeof v === "number" ? v : 0));
    const withValue = rows.filter((row) => known(row[mode.key]));
    const row = withValue.sort((a, b) => worst(b[mode.key]) - worst(a[mode.key]))[0] ?? rows[0], value = row[mode.key];
    const said = !known(value) ? "not known" : mode.text ? mode.text(value) : value;
    const others = rows.length > 1 ? `, worst of ${rows.length}` : "";
    const button = element("button", { "aria-label": `${row.name}: ${said}${others}`, title: `${row.name}: ${said}${others}`, tabindex: -1, "data-name": row.name });
    if (!known(value)) button.className = "unknown";
    else if (mode.ramp) {
      const share = Math.min(1, Math.max(0, mode.at(value)));
      button.style.background = mixture(mode.ramp, share);
      button.style.color = `var(${share < 0.6 ? "--text" : "--back"})`;
      button.textContent = mode.cell(value);
    } else {
      button.style.background = colour(mode.values.indexOf(value));
      button.style.color = "#fff";
      button.textContent = typeof value === "number" ? value : "";
    }
    if (current === row) button.setAttribute("aria-current", "true");
    return button;
  }
  function cellsOf(head, body, columns, label) {
    const room = (document.getElementById("map").clientWidth - 150) / columns.length;
    const widest = `max-width:calc(9.5rem + ${columns.length} * 5rem)`; // two layers do not fill the window
    const table = element("table", { class: room < 22 ? "map dense" : "map", "aria-label": label, style: widest });
    table.append(element("colgroup", {}, element("col", { class: "names" }), ...columns.map(() => element("col"))));
    if (head) {
      const tenth = Math.max(1, Math.ceil(columns.length / 12));
      const titles = columns.map((one, i) => element("th", { scope: "col", class: i % tenth ? "" : "tenth" }, one));
      table.append(element("thead", {}, element("tr", {}, element("th", {}, head), ...titles)));
    }
    const lines = body.map(([name, cells]) => element("tr", {}, element("th", { scope: "row", title: name }, ...breakable(name)),
      ...cells.map((rows) => element("td", {}, ...(rows?.length ? [cellOf(rows)] : [])))));
    table.append(element("tbody", {}, ...lines));
    return table;
  }
  function drawMap() {
    const place = document.getElementById("map"), hadFocus = place.contains(document.activeElement) && document.activeElement.dataset.mode;
    mode.values = [...new Set(layers.map((row) => row[mode.key]).filter(known))].sort();
    const buttons = modes.map((one) => {
      const button = element("button", { "aria-pressed": one === mode, "data-mode": one.key }, one.title);
      button.addEventListener("click", () => { mode = one; drawMap(); });
      return button;
    });
    const tools = element("div", { class: "tools" }, element("h2", { style: "margin:0" }, isStrip ? "All layers" : "Layers by depth and kind"),
      element("div", { class: "switch", role: "group", "aria-label": "colour by" }, ...buttons));
    if (mode.ramp) {
      const [low, high] = ramps[mode.ramp][mode.key === "sqnr" ? "toReversed" : "slice"]();
      const bar = element("span", { class: "ramp", style: `background:linear-gradient(to right in oklab, var(${low}), var(${high}))` });
      if (mode.mark) bar.append(element("i", { style: `left:${100 * mode.mark}%` }));
      const ramp = element("span", {}, mode.ends[0], bar, mode.ends[2]);
      tools.append(element("span", { class: "legend" }, ramp, mode.ends[1]));
    } else tools.append(legend(mode.values.map(String)));
    const tables = [], others = isStrip ? [] : inOrder.filter((row) => !known(row.depth));
    if (!isStrip) {
      const at = new Map();
      for (const row of deep) { const key = `${row.kind}|${row.depth}`; at.set(key, [...(at.get(key) ?? []), row]); }
      const body = kinds.map((kind) => [kindName(kind), depths.map((depth) => at.get(`${kind}|${depth}`))]);
      tables.push(cellsOf("depth", body, depths, "layers by depth and kind"));
    }
    const isNamed = isStrip && layers.length <= 8; // few enough for a line each
    if (isNamed) tables.push(cellsOf("", inOrder.map((row) => [row.name, [[row]]]), [""], "layers in order"));
    const rest = isNamed ? [] : isStrip ? inOrder : others;
    for (let from = 0; from < rest.length; from += 40) {
      const part = rest.slice(from, from + 40), all = [...part, ...Array(rest.length > 40 ? 40 - part.length : 0)];
      tables.push(cellsOf("", [[from ? "" : isStrip ? "in order" : "others", all.map((row) => row && [row])]], all, "layers in order"));
    }
    const scroll = element("div", {}, ...tables);
    place.replaceChildren(tools, scroll);
    const first = scroll.querySelector("[aria-current]") ?? scroll.querySelector("td button");
    if (first) first.tabIndex = 0;
    if (hadFocus) place.querySelector(`[data-mode=${hadFocus}]`).focus();
    scroll.addEventListener("keydown", (event) => {
      const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
      const cell = event.target.closest("td");
      if (!move || !cell) return;
      event.preventDefault();
      const lines = [...scroll.querySelectorAll("tbody tr")];
      let [line, column] = [lines.indexOf(cell.parentElement), cell.cellIndex], next = null, button = null;
      do {
        line += move[0]; column += move[1];
        next = lines[line]?.cells[column];
        button = next?.querySelector("button");
      } while (next && !button);
      if (!button) return;
      event.target.tabIndex = -1;
      button.tabIndex = 0;
      button.focus();
    });
  }
  function openLayer(row, from) {
    const panel = document.getElementById("layer");
    current = current === row ? null : row;
    panel.hidden = !current;
    for (const one of document.querySelectorAll("[data-name]")) one.setAttribute("aria-current", one.dataset.name === current?.name);
    if (!current) return from?.focus();
    const close = element("button", { class: "close" }, "close");
    close.addEventListener("click", () => openLayer(row, from));
    panel.replaceChildren(element("div", { class: "bar" }, element("h3", {}, ...breakable(row.name)), close));
    panel.append(detail(row, panel.clientWidth - 32));
  }
  document.addEventListener("click", (event) => {
    const from = event.target.closest("[data-name]");
    if (from) openLayer(byName.get(from.dataset.name), from);
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape" && current) openLayer(current); });

  // ------------------------------------------------------------------ a layer's own view
  function histogram(row, width) {
    const { low, high, counts } = row.histogram, limited = known(row.grid ?? row.chosen_low);
    const [from, to] = row.grid ?? [row.chosen_low, row.chosen_high], room = 0.15 * (high - low);
    const most = Math.log10(1 + Math.max(...counts)), powers = [...Array(Math.floor(most) + 1).keys()];
    const marks = powers.filter((n) => n % Math.ceil((most + 1) / 5) === 0);
    const ends = limited ? [Math.max(Math.min(low, from), low - room), Math.min(Math.max(high, to), high + room)] : [low, high];
    const picture = plot(width, 190, `histogram of the inputs of ${row.name}, from ${short(low)} to ${short(high)}`, {
      x: ends[0] < ends[1] ? ends : [ends[0] - 1, ends[1] + 1], y: [0, most || 1], xlabel: "input value", ylabel: "values seen", yticks: marks,
      format: (v) => (v < 4 ? String(10 ** v) : `1e${v}`),
    });
    const { svg, X, Y, bottom, top } = picture;
    svg.setAttribute("class", "histogram");
    if (limited) {
      const x = X(Math.max(from, ends[0])), width = Math.max(1, X(Math.min(to, ends[1])) - x);
      const band = drawn("rect", { x, width, y: top, height: bottom - top, class: "chosen" });
      band.append(drawn("title", {}, `chosen range ${short(from)} to ${short(to)}`));
      svg.append(band);
    }
    const wide = (high - low) / counts.length;
    counts.forEach((count, i) => {
      if (!count) return;
      const middle = low + (i + 0.5) * wide, out = limited && (middle + wide / 2 < from || middle - wide / 2 > to);
      const y = Y(Math.log10(1 + count));
      const bar = drawn("rect", { x: X(low + i * wide), width: Math.max(1, X(low + wide) - X(low) - 0.6), y, height: bottom - y, class: out ? "bin out" : "bin" });
      bar.append(drawn("title", {}, `${short(middle)}: ${count.toLocaleString("en")}`));
      svg.append(bar);
    });
    svg.append(drawn("line", { x1: X(low), x2: X(high), y1: top - 4, y2: top - 4, class: "observed" }, drawn("title", {}, `observed ${short(low)} to ${short(high)}`)));
    const levels = row.grid && row.scheme.includes(`int${row.input_width}`) ? 2 ** row.input_width - 1 : 0, step = (to - from) / levels;
    if (levels && X(low + step) - X(low) >= 1.5)
      for (let n = 0; n <= levels; n++) {
        const x = X(from + n * step);
        if (x >= X(ends[0]) && x <= X(ends[1])) svg.append(drawn("line", { x1: x, x2: x, y1: bottom, y2: bottom + 5, class: "level" }));
      }
    const said = [`observed ${short(low)} to ${short(high)} (line)`, limited ? `the scale holds ${short(from)} to ${short(to)} (band)` : "no static range"];
    if (levels) said.push(`${levels + 1} levels, ${short(step)} apart`);
    return element("div", {}, element("strong", {}, "Inputs"), svg, element("p", { class: "note" }, said.join("; ")));
  }
  function channels(row, width) {
    const values = row.channels, label = `largest weight of each output channel of ${row.name}`, each = row.outputs / values.length;
    const above = values.filter((value) => value > 0).sort((a, b) => b - a), log = above.length > 1 && above[0] > 20 * above[1];
    const picture = plot(width, 150, label, {
      x: [0, row.outputs], y: log ? [above.at(-1) / 2, above[0]] : [0, Math.max(...values) || 1], log, xlabel: "output channel", ylabel: "range",
    });
    values.forEach((value, i) => {
      const y = log && !(value > 0) ? picture.bottom : picture.Y(value);
      picture.svg.append(drawn("rect", { x: picture.X(i * each), width: Math.max(1, picture.X(each) - picture.X(0) - 0.6), y, height: picture.bottom - y, class: "bin" }));
    });
    return element("div", {}, element("strong", {}, "Weight, range by channel"), picture.svg);
  }
  function numbers(row) {
    const bases = ["weight", "input", "output"].filter((base) => known(row[base + "_low"]) || known(row[base + "_sqnr"]));
    const keys = [["sqnr", "SQNR [dB]"], ["mse", "MSE"], ["cosine", "cosine"], ["clipped", "clipped [%]"],
      ["low", "smallest"], ["high", "largest"], ["bits", "bits in use"]];
    const head = element("tr", {}, element("th", {}, ""), ...bases.map((base) => element("th", { scope: "col" }, base)));
    const lines = keys.map(([key, title]) => element("tr", {}, element("th", { scope: "row" }, title),
      ...bases.map((base) => element("td", {}, known(row[`${base}_${key}`]) ? short(row[`${base}_${key}`]) : ""))));
    const made = element("div", {}, element("table", {}, element("thead", {}, head), element("tbody", {}, ...lines)));
    const fused = (data.fused.find((names) => names.includes(row.name)) ?? []).filter((name) => name !== row.name);
    const said = {
      scheme: row.scheme, choice: row.choice, "ranges found by": ["weight", "input"].filter((base) => row[`${base}_observer`]).map((base) => `${row[`${base}_observer`]} (${base})`).join(", "),
      size: known(row.after) && row.before ? `${size(row.before)} \u2192 ${size(row.after)}` : "",
      [`share of the ${lost}`]: known(row.share) ? `${row.share.toFixed(1)} %, of that ${(100 * row.by_input).toFixed(0)} % by its input` : "",
      "read first by": (row.feeds ?? []).join(", "), "shares its scheme with": fused.join(", "),
    };
    for (const [title, text] of Object.entries(said))
      if (text) made.append(element("p", { class: "line" }, element("span", { class: "muted" }, `${title}: `), text));
    return made;
  }
  function detail(row, room) {
    const views = [row.histogram, row.channels?.length].filter(Boolean).length + 1;
    const width = Math.max(240, room / Math.max(1, Math.min(views, Math.floor(room / 320))) - 24);
    const two = element("div", { class: "two" }, numbers(row));
    if (row.histogram) two.append(histogram(row, width));
    if (row.channels?.length) two.append(channels(row, width));
    return two;
  }
  // ------------------------------------------------------------------ pictures of the run
  function whereItLoses() {
    const ordered = layers.filter((row) => row.share > 0).sort((a, b) => b.share - a.share);
    if (ordered.length < 2) return;
    let sum = 0;
    const curve = [[0, 0], ...ordered.map((row, i) => [i + 1, Math.min(100, (sum += row.share))])];
    const isFew = ordered.length < 8; // their table says it all
    const many = curve.find(([, share]) => share >= 80)?.[0] ?? ordered.length;
    const said = `${many} of ${layers.length} layers hold 80 % of the ${lost}`;
    if (!isFew) figure(`Where the ${lost} sits`, (width) => {
      const picture = plot(width, 230, said, { x: [0, ordered.length], y: [0, 100], xlabel: "layers, worst first", ylabel: `share of the ${lost} [%]` });
      picture.svg.append(drawn("path", { d: path(curve.map(([x, y]) => [picture.X(x), picture.Y(y)])), class: "curve" }));
      picture.svg.append(drawn("line", { x1: picture.X(many), x2: picture.X(many), y1: picture.Y(0), y2: picture.Y(80), class: "limit" }));
      const end = many > ordered.length * 0.6;
      picture.svg.append(drawn("text", { x: picture.X(many) + (end ? -6 : 6), y: picture.Y(40), "text-anchor": end ? "end" : "start", class: "strong" }, `the worst ${many}: 80 %`));
      return picture.svg;
    });
    const worst = ordered.slice(0, 10), length = lengths(worst.map((row) => row.share));
    const part = (row, i, share, base) => bar(length.of(row.share) * share, i, `${base}: ${(row.share * share).toFixed(2)} % of the ${lost}`);
    const lines = worst.map((row) => element("tr", {}, element("th", { scope: "row" }, element("button", { title: row.name, "data-name": row.name }, ...breakable(row.name))),
      element("td", { class: "track" }, part(row, 0, 1 - row.by_input, "weight"), part(row, 1, row.by_input, "input")),
      element("td", {}, `${row.share.toFixed(1)} %`)));
    const head = element("thead", {}, element("tr", {}, ...["layer", "", `share of the ${lost}`].map((title) => element("th", { scope: "col" }, title))));
    const table = element("table", { class: "bars", "aria-label": `the worst layers: share of the ${lost} by weight and by input` }, head, element("tbody", {}, ...lines));
    figure("The worst layers: is it the weight or the input?", () => [legend(["weight", "input"]), table], length.note);
  }
  function frontier() {
    const points = data.frontier.filter((point) => known(point.loss) && point.mark !== "full precision");
    if (!points.length) return;
    const full = data.frontier.find((point) => point.mark === "full precision");
    const losses = points.map((point) => point.loss), log = Math.min(...losses) > 0 && Math.max(...losses) > 30 * Math.min(...losses);
    const low = Math.min(...losses), high = Math.max(...losses), unit = data.sensitivity_unit.includes("nats") ? " [nats]" : "";
    const [chosen, measured] = ["chosen", "measured"].map((mark) => points.find((point) => point.mark === mark));
    const note = [chosen ? `Chosen: ${short(chosen.bits_per_weight)} bits per weight, an estimated loss of ${short(chosen.loss)}.` : "",
      measured ? `Measured of it (ring): ${short(measured.loss)}.` : "",
      full ? `Full precision: ${short(full.bits_per_weight)} bits per weight, loss ${short(full.loss)}.` : ""].filter(Boolean).join(" ");
    figure("Estimated loss against size", (width) => {
      const picture = plot(width, 300, "estimated loss against bits per weight", {
        x: around(points.map((point) => point.bits_per_weight)), y: log ? [low / 1.5, high * 1.5] : around(losses),
        log, xlabel: "bits per weight", ylabel: `estimated loss${unit}`,
      });
      let best = Infinity;
      const front = points.filter((point) => point.mark !== "measured").sort((a, b) => a.bits_per_weight - b.bits_per_weight || a.loss - b.loss)
        .filter((point) => point.loss < best && ((best = point.loss), true));
      picture.svg.append(drawn("path", { d: path(front.map((point) => [picture.X(point.bits_per_weight), picture.Y(point.loss)])), class: "curve" }));
      for (const point of points) {
        const shape = { chosen: "chosen-mark", measured: "ring" }[point.mark] ?? (front.includes(point) ? "mark" : "plain-mark");
        // the curve falls: there is room above it to the right, and below it to the left
        const below = point.mark && measured && point.loss === Math.min(chosen?.loss, measured.loss);
        dot(picture, point.bits_per_weight, point.loss, shape, point.name || (point.mark ?? ""), below ? [-10, 16] : point.mark ? [10, -8] : [7, -5]);
      }
      return picture.svg;
    }, note);
  }
  function observers() {
    if (!data.scores.length) return;
    const length = lengths(data.scores.map((score) => score.measured));
    const lines = data.scores.map((score) =>
      element("tr", {}, element("th", { scope: "row" }, `${score.of}: `, ...breakable(score.observer)),
        element("td", { class: "track" }, bar(length.of(score.measured), score.chosen ? 1 : 0)), ...[short(score.measured), short(score.loss), String(score.tensors)].map((text) => element("td", {}, text))));
    const head = element("thead", {}, element("tr", {}, ...["observer", "", "measured [nats]", "estimated", "chosen for"].map((title) => element("th", { scope: "col" }, title))));
    figure("What each observer would lose", () => element("table", { class: "bars" }, head, element("tbody", {}, ...lines)),
      `${data.scored.map((line) => `${line}. `).join("")}What was chosen is orange; estimates add up what each layer does alone. ${length.note}`);
  }
  function bytes() {
    const names = Object.keys(data.kinds), sums = [0, 1].map((i) => names.reduce((sum, name) => sum + data.kinds[name][i], 0));
    if (!sums[0]) return;
    const stack = (i) => element("div", { class: "stack", role: "img", "aria-label": `${i ? "after" : "before"}: ${size(sums[i])}` },
      ...names.map((name, k) => bar(data.kinds[name][i] / sums[0], k, `${name}: ${size(data.kinds[name][i])}`)));
    const key = legend(names);
    [...key.children].forEach((one, k) => one.append(` ${data.kinds[names[k]].map(size).join(" \u2192 ")}`));
    const more = data.size - sums[1] > 2 ** 19 ? `The checkpoint's folder holds ${size(data.size - sums[1])} beside them, such as the tokenizer.` : "";
    figure("Bytes of the weights", () => [element("div", {}, `before, ${size(sums[0])}`), stack(0), element("div", {}, `after, ${size(sums[1])}`), stack(1), key], more);
  }
  function lines(title, steps, series, ylabel) {
    const values = series.flatMap(([, all]) => all.filter(known));
    if (steps.length < 2 || !values.length) return;
    figure(title, (width) => {
      const picture = plot(width, 240, title, { x: [Math.min(...steps), Math.max(...steps)], y: around(values), xlabel: "step", ylabel });
      series.forEach(([name, all], i) => {
        const points = all.flatMap((v, n) => (known(v) ? [[picture.X(steps[n]), picture.Y(v)]] : []));
        picture.svg.append(drawn("path", { d: path(points), class: "curve", style: `stroke:${colour(i)}` }, drawn("title", {}, name)));
      });
      return [picture.svg, legend(series.map(([name]) => name))];
    });
  }
  function overTime() {
    const keys = [...new Set(data.curves.flatMap((point) => Object.keys(point)))].filter((key) => key !== "step");
    const plainName = (key) => key.replace("_quantized", "");
    for (const base of new Set(keys.map(plainName)))
      lines(base, data.curves.map((point) => point.step), keys.filter((key) => plainName(key) === base).map((key) => [key, data.curves.map((point) => point[key])]), base);
    if (!data.drift) return;
    const { steps, drifts } = data.drift;
    const whole = Object.entries(drifts).filter(([, history]) => history.length === steps.length && history.some((moved) => moved > 0));
    whole.sort((a, b) => b[1].at(-1) - a[1].at(-1));
    lines("Drift of the scales: those that moved most", steps, whole.slice(0, 6), "|log2(scale / first)|");
  }
  // Names at points: each where it covers nothing, right, left, below or above of its point; else the run's number.
  // Points that lie on one another share their numbers; where there is no room, the table has them.
  function nameAtPoints(picture, points) {
    const groups = [];
    for (const point of points) {
      const near = groups.find(([first]) => Math.hypot(first.x - point.x, first.y - point.y) < 9);
      if (near) near.push(point); else groups.push([point]);
    }
    const taken = points.map(({ x, y }) => [x - 6, y - 6, x + 6, y + 6]);
    const isFree = ([left, top, right, bottom]) => left >= picture.left && right <= picture.right && top >= picture.top - 8 && bottom <= picture.bottom
      && !taken.some((box) => left < box[2] && right > box[0] && top < box[3] && bottom > box[1]);
    for (const group of groups) {
      const { x, y } = group[0], together = group.map((point) => point.names.at(-1)).join(", ");
      const names = group.length > 1 ? [together] : group[0].names;
      const places = names.flatMap((name) => {
        const wide = 6.4 * name.length;
        return [[x + 9, y + 4, wide], [x - 9 - wide, y + 4, wide], [x - wide / 2, y + 19, wide], [x - wide / 2, y - 10, wide]].map((place) => [name, ...place]);
      });
      const box = ([, left, base, wide]) => [left, base - 11, left + wide, base + 3];
      const free = places.find((place) => isFree(box(place)));
      if (!free) continue;
      taken.push(box(free));
      picture.svg.append(drawn("text", { x: free[1], y: free[2], class: "strong" }, free[0]));
    }
  }
  function comparison() {
    const judged = data.runs.map((run, i) => ({ ...run, metric: run.quality[0], before: run.quality[1], after: run.quality[2], number: i + 1 }))
      .filter((run) => run.metric && known(run.after));
    for (const name of new Set(judged.map((run) => run.metric))) {
      const runs = judged.filter((run) => run.metric === name), sized = runs.filter((run) => run.size), rest = runs.filter((run) => !run.size);
      // runs of one model have one original: a point where its size is known, else a line
      const befores = [...new Set(runs.map((run) => run.before).filter(known))], wholes = [...new Set(runs.map((run) => run.original_size).filter(known))];
      const full = befores.length === 1 ? befores[0] : null, whole = known(full) && wholes.length === 1 ? wholes[0] : null;
      const mib = (bytes) => bytes / 2 ** 20, best = sized.filter((run) => run.is_best).sort((a, b) => a.size - b.size);
      const notes = ["A dashed line joins the best of their size.", known(whole) ? "The square is the original." : "", rest.length ? "A ring: the size is not known." : ""];
      figure(`${name} against size`, (width) => {
        const sizes = [...sized.map((run) => mib(run.size)), ...(known(whole) ? [mib(whole)] : [])];
        // equal runs lie on one another: no axis is shorter than a twentieth of its largest value
        const x = sizes.length ? around(sizes, 0.15, 0.2) : [0, 1], y = around([...runs.map((run) => run.after), ...(known(full) ? [full] : [])], 0.15, 0.05);
        const label = `${name} of ${runs.length} runs against size`;
        const picture = plot(width, 320, label, { x: [Math.max(0, x[0]), x[1]], y, xlabel: sizes.length ? "size [MiB]" : "no run knows its size", ylabel: name });
        if (known(full) && !known(whole)) {
          picture.svg.append(drawn("line", { x1: picture.left, x2: picture.right, y1: picture.Y(full), y2: picture.Y(full), class: "limit" }));
          picture.svg.append(drawn("text", { x: picture.left + 4, y: picture.Y(full) - 5 }, `original ${short(full)}`));
        }
        if (best.length > 1) picture.svg.append(drawn("path", { d: path(best.map((run) => [picture.X(mib(run.size)), picture.Y(run.after)])), class: "frontier" }));
        const points = [];
        if (known(whole)) {
          const [px, py] = [picture.X(mib(whole)), picture.Y(full)], square = drawn("rect", { x: px - 4.5, y: py - 4.5, width: 9, height: 9, class: "original-mark" });
          square.append(drawn("title", {}, `original: ${size(whole)}, ${short(full)}`));
          picture.svg.append(square);
          points.push({ x: px, y: py, names: ["original"] });
        }
        for (const run of [...sized, ...rest]) {
          const px = run.size ? picture.X(mib(run.size)) : picture.left, py = picture.Y(run.after);
          const mark = drawn("circle", { cx: px, cy: py, r: run.size ? 5 : 6, class: run.size ? "mark" : "ring" });
          mark.append(drawn("title", {}, `${run.number}. ${run.run}: ${run.size ? size(run.size) : "size not known"}, ${short(run.after)}`));
          picture.svg.append(mark);
          points.push({ x: px, y: py, names: [...(width > 560 && run.run.length <= 40 ? [`${run.number}. ${run.run}`] : []), String(run.number)] });
        }
        nameAtPoints(picture, points);
        return picture.svg;
      }, notes.filter(Boolean).join(" "));
    }
  }
  if (layers.length) drawings.push(drawMap);
  frontier(); observers(); whereItLoses(); bytes(); overTime(); comparison();
  let waiting = 0;
  const redraw = () => drawings.forEach((draw) => draw());
  redraw();
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(redraw, 100); });

  // ------------------------------------------------------------------ steps: as a command or Python, to copy
  for (const button of document.querySelectorAll("[data-as]"))
    button.addEventListener("click", () => {
      for (const other of document.querySelectorAll("[data-as]")) {
        other.setAttribute("aria-pressed", other === button);
        for (const one of document.querySelectorAll(`li:has(.command) .copy.${other.dataset.as}`)) one.hidden = other !== button;
      }
    });
  for (const button of document.querySelectorAll(".copy button"))
    button.addEventListener("click", async () => {
      const text = button.previousElementSibling;
      try { await navigator.clipboard.writeText(text.textContent); button.textContent = "copied"; } catch {
        getSelection().selectAllChildren(text); // the browser lets no page write: it is marked, to be copied by hand
        button.textContent = "selected";
      }
    });

  // ------------------------------------------------------------------ the table of layers
  const table = document.getElementById("layers");
  if (!table) return;
  const shape = (places) => (v) => (typeof v === "string" ? v : places === null ? short(v) : v.toFixed(places));
  // key, title, how a number is shown, whether it is left out on a phone, whether sorting starts with the smallest
  const columns = data.shown.map(([key, title, places, wide, up]) => [key, title, shape(places), wide, up])
    .filter(([key]) => layers.some((row) => known(row[key])));
  const step = 200;
  let sorted = null, up = true, shown = step;

  function line(row) {
    const cells = columns.map(([key, , format, wide], i) => {
      const text = known(row[key]) ? format(row[key]) : "";
      const cell = element("td", wide ? { class: "wide" } : {});
      cell.append(...(i === 0 ? [element("button", {}, ...breakable(text))] : [text]));
      if (key === "sqnr" && known(row.sqnr) && row.sqnr < poor) cell.className = "poor";
      return cell;
    });
    return element("tr", { class: "layer", "data-name": row.name, ...(current === row ? { "aria-current": "true" } : {}) }, ...cells);
  }
  function draw() {
    const words = document.getElementById("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = layers.filter((row) => words.every((word) => `${row.name} ${row.choice ?? ""}`.toLowerCase().includes(word)));
    if (sorted) {
      const sign = up ? 1 : -1;
      found.sort((a, b) => {
        const [x, y] = [a[sorted], b[sorted]];
        if (!known(x) || !known(y)) return known(y) - known(x); // what is not known stands at the end
        return sign * (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y);
      });
    }
    table.tBodies[0].replaceChildren(...found.slice(0, shown).map(line));
    document.getElementById("count").textContent =
      `${found.length.toLocaleString("en")} of ${layers.length.toLocaleString("en")} layers`;
    const more = document.getElementById("more");
    more.hidden = found.length <= shown;
    more.textContent = `show ${Math.min(step, found.length - shown)} more`;
  }
  const head = element("tr");
  for (const [key, title, , wide, smallestFirst] of columns) {
    const cell = element("th", { scope: "col", ...(wide ? { class: "wide" } : {}) }, element("button", {}, title));
    cell.addEventListener("click", () => {
      up = sorted === key ? !up : smallestFirst;
      sorted = key;
      for (const other of head.children) other.removeAttribute("aria-sort");
      cell.setAttribute("aria-sort", up ? "ascending" : "descending");
      shown = step;
      draw();
    });
    head.append(cell);
  }
  table.tHead.replaceChildren(head);
  document.getElementById("search").addEventListener("input", () => { shown = step; draw(); });
  document.getElementById("more").addEventListener("click", () => { shown += step; draw(); });
  draw();
  // report.html#layer=<name> opens that layer
  const wanted = byName.get(decodeURIComponent(location.hash).replace(/^#layer=/, ""));
  if (wanted) openLayer(wanted);
})();

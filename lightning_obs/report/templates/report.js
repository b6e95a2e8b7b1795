"use strict";
(() => {
  const { layers, shown: titles, poor } = JSON.parse(document.getElementById("data").textContent);
  const table = document.getElementById("layers");
  if (!table) return;
  const digits = (n) => (v) => v.toFixed(n);
  const short = (v) => String(Number(v.toPrecision(4)));
  const shape = (places) => (v) => (typeof v === "string" ? v : places === null ? short(v) : digits(places)(v));
  // key, title, how a number is shown, whether it is left out on a phone, whether sorting starts with the smallest
  const columns = titles.map(([key, title, places, wide, up]) => [key, title, shape(places), wide, up])
    .filter(([key]) => layers.some((row) => known(row[key])));
  const step = 200;
  let sorted = null, up = true, shown = step;

  function known(value) { return value !== undefined && value !== null; }
  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }
  function drawn(name, attributes, text) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function breakable(name) { // a line may end behind a dot or an underscore
    return name.split(/(?<=[._])/).flatMap((part) => [part, document.createElement("wbr")]);
  }

  function histogram(row) {
    const { low, high, counts } = row.histogram, width = 480, height = 150, bottom = 130;
    const most = Math.log1p(Math.max(...counts)), span = high - low || 1;
    const at = (value) => Math.min(width, Math.max(0, ((value - low) / span) * width));
    const limited = known(row.chosen_low);
    const svg = drawn("svg", {
      viewBox: `0 0 ${width} ${height}`, role: "img", class: "histogram",
      "aria-label": `histogram of the inputs of ${row.name}`,
    });
    counts.forEach((count, i) => {
      const x = (i * width) / counts.length, tall = most ? (Math.log1p(count) / most) * (bottom - 8) : 0;
      const middle = low + ((i + 0.5) / counts.length) * span;
      const out = limited && (middle < row.chosen_low || middle > row.chosen_high);
      const bar = drawn("rect", {
        x, y: bottom - tall, width: width / counts.length - 1, height: tall, class: out ? "bar out" : "bar",
      });
      bar.append(drawn("title", {}, `${short(middle)}: ${count.toLocaleString("en")}`));
      svg.append(bar);
    });
    svg.append(drawn("line", { x1: 0, x2: width, y1: bottom, y2: bottom, class: "axis" }));
    if (limited)
      for (const end of [row.chosen_low, row.chosen_high])
        svg.append(drawn("line", { x1: at(end), x2: at(end), y1: 0, y2: bottom, class: "chosen" }));
    svg.append(drawn("text", { x: 0, y: height - 4, class: "label" }, short(low)));
    svg.append(drawn("text", { x: width, y: height - 4, class: "label", "text-anchor": "end" }, short(high)));
    const caption = limited ? `chosen range ${short(row.chosen_low)} to ${short(row.chosen_high)}` : "no static range";
    svg.append(drawn("text", { x: width / 2, y: height - 4, class: "label", "text-anchor": "middle" }, caption));
    return svg;
  }

  function numbers(row) {
    const kinds = ["weight", "input", "output"].filter((kind) => known(row[kind + "_low"]) || known(row[kind + "_sqnr"]));
    const keys = [["sqnr", "SQNR [dB]"], ["mse", "MSE"], ["cosine", "cosine"], ["clipped", "clipped [%]"],
      ["low", "smallest"], ["high", "largest"], ["bits", "bits in use"]];
    const head = element("tr", {}, element("th", {}, ""), ...kinds.map((kind) => element("th", {}, kind)));
    const lines = keys.map(([key, title]) => element("tr", {}, element("td", {}, title),
      ...kinds.map((kind) => element("td", {}, known(row[`${kind}_${key}`]) ? short(row[`${kind}_${key}`]) : ""))));
    return element("table", {}, element("thead", {}, head), element("tbody", {}, ...lines));
  }

  function open(line, row) {
    const button = line.querySelector("button"), isOpen = line.classList.toggle("open");
    button.setAttribute("aria-expanded", isOpen);
    if (!isOpen) return line.nextSibling.remove();
    const two = element("div", { class: "two" }, numbers(row));
    if (row.histogram) two.append(histogram(row));
    line.after(element("tr", { class: "detail" }, element("td", { class: "panel", colspan: columns.length }, two)));
  }

  function line(row) {
    const cells = columns.map(([key, , format, wide], i) => {
      const text = known(row[key]) ? format(row[key]) : "";
      const cell = element("td", wide ? { class: "wide" } : {});
      cell.append(i === 0 ? element("button", { "aria-expanded": false }, ...breakable(text)) : text);
      if (key === "sqnr" && known(row.sqnr) && row.sqnr < poor) cell.className = "poor";
      return cell;
    });
    const made = element("tr", { class: "layer" }, ...cells);
    made.addEventListener("click", () => open(made, row));
    return made;
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
  const wanted = decodeURIComponent(location.hash).replace(/^#layer=/, "");
  if (layers.some((row) => row.name === wanted)) {
    document.getElementById("search").value = wanted;
    draw();
    table.tBodies[0].rows[0].click();
  }
})();

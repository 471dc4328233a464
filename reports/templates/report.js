(() => {
  "use strict";
  const root = document.documentElement;
  const read = (id, revive) => JSON.parse(document.getElementById(id).textContent, revive);
  // What stands once: strings, and lists that may refer to what stands before them.
  const texts = read("report-texts");
  const whole = (value) => (value && value.$ !== undefined ? texts[value.$] : Array.isArray(value) ? value.map(whole) : value);
  texts.forEach((value, place) => { texts[place] = whole(value); });
  const source = read("report-data", (key, value) => (value && value.$ !== undefined ? texts[value.$] : value));
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const narrow = window.matchMedia("(max-width: 640px)");
  const SVG = "http://www.w3.org/2000/svg";
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);

  // Figures carry the light colours; a dark page swaps each for its partner.
  const coloured = (value) => {
    if (typeof value === "string") return isDark() ? source.colours[value] ?? value : value;
    if (Array.isArray(value)) return value.map(coloured);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, coloured(item)]));
    }
    return value;
  };
  const plain = (text) => text.replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");

  class Figure {
    constructor(element) {
      this.element = element;
      this.panel = source.panels[element.dataset.panel];
      this.chart = element.querySelector(".chart");
      this.box = element.querySelector(".chart-box");
      this.legend = element.querySelector(".legend");
      this.none = element.querySelector(".variant-missing");
      this.hidden = new Set();
      this.controls = [...element.querySelectorAll("[data-control]")];
      for (const control of this.controls) {
        control.addEventListener("change", () => { this.hidden.clear(); this.draw(); });
      }
    }

    key() {
      const first = Object.keys(this.panel.variants)[0].split("-");
      for (const control of this.controls) {
        const field = control.matches("select") ? control : control.querySelector("input:checked");
        first[Number(control.dataset.control)] = field.value;
      }
      return first.join("-");
    }

    height() {
      if (this.panel.rows && (narrow.matches || !this.element.closest(".two"))) return 96 + this.panel.rows * (narrow.matches ? 44 : 40);
      if (this.element.closest(".many")) return 320;
      return narrow.matches ? 330 : this.element.closest(".two") ? 390 : 460;
    }

    async draw() {
      const variant = this.panel.variants[this.key()];
      this.none.hidden = !variant.missing;
      this.box.hidden = this.legend.hidden = Boolean(variant.missing);
      if (variant.missing) {
        this.none.textContent = variant.missing;
        return;
      }
      this.chart.querySelector(".no-js")?.remove();
      this.box.style.minHeight = `${this.height()}px`;
      const data = coloured(variant.data);
      const layout = coloured({ ...variant.layout, template: source.template });
      layout.autosize = true;
      layout.dragmode = narrow.matches ? false : "zoom";
      if (narrow.matches) {
        layout.font = { size: 11.5 };
        // A lane's title keeps its first part: there is no room for more.
        for (const note of layout.annotations ?? []) note.text = note.text.split(" · ")[0];
        // Beside so little a chart the metric's short name has to do.
        for (const [key, axis] of Object.entries(layout)) {
          if (/^[xy]axis/.test(key) && axis.title?.text) axis.title.text = axis.title.text.replace("end-to-end ", "");
        }
      }
      if (narrow.matches || this.element.closest(".many")) thinTicks(layout.xaxis);
      data.forEach((trace, index) => { trace.visible = this.hidden.has(index) ? false : true; });
      this.writeLegend(data);
      await Plotly.react(this.chart, data, layout, {
        displaylogo: false, scrollZoom: false, doubleClick: "reset+autosize",
        displayModeBar: narrow.matches ? false : "hover",
        modeBarButtonsToRemove: ["select2d", "lasso2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
        toImageButtonOptions: { format: "png", scale: 2, filename: `ppas-${this.element.dataset.panel}` },
      });
      // The drawing's loose labels tell a screen reader nothing: the text alternative and the tables do.
      this.chart.querySelectorAll(".main-svg").forEach((svg) => svg.setAttribute("aria-hidden", "true"));
      if (!this.listening) {
        this.listening = true;
        new ResizeObserver(() => { if (!this.box.hidden) Plotly.Plots.resize(this.chart); }).observe(this.box);
        this.chart.on("plotly_click", (event) => this.pin(event.points[0]));
      }
    }

    writeLegend(data) {
      const shown = data.map((trace, index) => ({ trace, index }))
        .filter(({ trace }) => trace.name && trace.showlegend !== false && trace.type !== "heatmap")
        .sort((a, b) => (a.trace.legendrank ?? 0) === (b.trace.legendrank ?? 0)
          ? a.index - b.index : (b.trace.legendrank ?? 0) - (a.trace.legendrank ?? 0));
      this.legend.replaceChildren(...(shown.length > 1 && !this.element.closest(".many") ? shown : []).map(({ trace, index }) => {
        const button = document.createElement("button");
        button.type = "button";
        button.setAttribute("aria-pressed", String(!this.hidden.has(index)));
        button.append(swatch(trace), plain(trace.name));
        button.addEventListener("click", () => {
          const hide = !this.hidden.has(index);
          const group = data.map((_, other) => other)
            .filter((other) => other === index || (trace.legendgroup && data[other].legendgroup === trace.legendgroup));
          for (const other of group) this.hidden[hide ? "add" : "delete"](other);
          button.setAttribute("aria-pressed", String(!hide));
          Plotly.restyle(this.chart, { visible: !hide }, group);
        });
        return button;
      }));
    }

    pin(point) {
      const number = Array.isArray(point.customdata) ? point.customdata[1] : undefined;
      const place = this.element.querySelector(".pinned");
      const row = number === undefined ? null : document.getElementById(`trial-${number}`);
      if (!place || !row) return;
      const heads = [...row.closest("table").querySelectorAll("thead th")].map((head) => head.textContent);
      const list = document.createElement("dl");
      [...row.cells].forEach((cell, index) => {
        const small = cell.querySelector("small");
        const text = small ? `${cell.firstChild.textContent} (${small.textContent})` : cell.textContent;
        if (!text) return;
        const pair = document.createElement("div");
        const term = document.createElement("dt");
        const value = document.createElement("dd");
        term.textContent = heads[index];
        value.textContent = text;
        pair.append(term, value);
        list.append(pair);
      });
      const link = document.createElement("a");
      link.href = `#${row.id}`;
      link.textContent = "Show in the table";
      place.replaceChildren(list, link);
      document.querySelectorAll("tr.marked").forEach((other) => other.classList.remove("marked"));
      row.classList.add("marked");
    }
  }

  // Where room is short long tick labels would tilt: every other one stays.
  function thinTicks(axis) {
    const texts = axis?.ticktext ?? [];
    if (texts.length < 5 || texts.join("").length < 24) return;
    axis.tickvals = axis.tickvals.filter((_, place) => place % 2 === 0);
    axis.ticktext = texts.filter((_, place) => place % 2 === 0);
  }

  function swatch(trace) {
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", "0 0 26 14");
    svg.setAttribute("aria-hidden", "true");
    const mark = (name, attributes) => {
      const node = document.createElementNS(SVG, name);
      for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
      svg.append(node);
    };
    const fill = trace.marker?.color ?? trace.line?.color ?? "currentColor";
    if (trace.type === "bar") {
      mark("rect", { x: 6, y: 1, width: 14, height: 12, rx: 2.5, fill });
      return svg;
    }
    if (trace.fill && trace.fill !== "none") {
      mark("rect", { x: 5, y: 1, width: 16, height: 12, rx: 2.5, fill: trace.fillcolor, stroke: trace.line.width > 0.8 ? trace.line.color : "none" });
      return svg;
    }
    if (trace.mode?.includes("lines")) {
      const dashes = { dash: "6 3", dot: "2 2.5", dashdot: "7 2.5 2 2.5", longdash: "9 3", longdashdot: "9 2.5 2 2.5" };
      mark("line", {
        x1: 1, x2: 25, y1: 7, y2: 7, stroke: trace.line.color, "stroke-width": Math.min(trace.line.width ?? 2, 3),
        "stroke-dasharray": dashes[trace.line.dash] ?? "none",
      });
    }
    if (trace.mode?.includes("markers")) {
      const symbol = trace.marker?.symbol ?? "circle";
      const shapes = {
        "circle": ["circle", { cx: 13, cy: 7, r: 4.2, fill }],
        "circle-open": ["circle", { cx: 13, cy: 7, r: 5, fill: "none", stroke: fill, "stroke-width": 2 }],
        "square": ["rect", { x: 9, y: 3, width: 8, height: 8, fill }],
        "square-open": ["rect", { x: 9, y: 3, width: 8, height: 8, fill: "none", stroke: fill, "stroke-width": 2 }],
        "diamond": ["path", { d: "M13 1.6 18.4 7 13 12.4 7.6 7z", fill }],
        "triangle-up": ["path", { d: "M13 2 18.2 11.4H7.8z", fill }],
        "triangle-down": ["path", { d: "M13 12 18.2 2.6H7.8z", fill }],
        "diamond-open": ["path", { d: "M13 1.6 18.4 7 13 12.4 7.6 7z", fill: "none", stroke: fill, "stroke-width": 2 }],
        "star": ["path", { d: "M13 .8 14.9 5h4.6l-3.7 2.8 1.4 4.6L13 9.6l-4.2 2.8 1.4-4.6L6.5 5h4.6z", fill }],
        "line-ns-open": ["path", { d: "M13 1v12", stroke: fill, "stroke-width": 2, fill: "none" }],
        "x": ["path", { d: "M9 3 17 11M17 3 9 11", stroke: fill, "stroke-width": 2.6, fill: "none" }],
        "cross": ["path", { d: "M13 2v10M8 7h10", stroke: fill, "stroke-width": 2.8, fill: "none" }],
      };
      mark(...(shapes[symbol] ?? shapes.circle));
    }
    return svg;
  }

  function makeSortable(table) {
    const body = table.tBodies[0];
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const descending = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", descending ? "descending" : "ascending");
        const value = (row) => {
          const cell = row.cells[column];
          if (cell.dataset.sort !== undefined) return Number(cell.dataset.sort);
          return head.classList.contains("number") ? NaN : cell.textContent;
        };
        const compare = (a, b) => {
          const [x, y] = [value(a), value(b)];
          const [noX, noY] = [Number.isNaN(x), Number.isNaN(y)];
          if (noX || noY) return noX - noY; // rows without a value stay last
          const order = typeof x === "number" && typeof y === "number"
            ? x - y : String(x).localeCompare(String(y), "en", { numeric: true });
          return descending ? -order : order;
        };
        body.append(...[...body.rows].sort(compare));
      });
    });
  }

  function makeFilter(card) {
    const input = card.querySelector(".filter input");
    const count = card.querySelector(".count");
    const rows = [...card.querySelector("tbody").rows].map((row) => ({ row, text: row.textContent.toLowerCase() }));
    input.addEventListener("input", () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const { row, text } of rows) {
        row.hidden = !words.every((word) => text.includes(word));
        shown += row.hidden ? 0 : 1;
      }
      count.textContent = words.length ? `${shown} of ${rows.length} rows` : `${rows.length} row${rows.length === 1 ? "" : "s"}`;
    });
  }

  function makeCopy(button) {
    const source = document.getElementById(button.dataset.copy);
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(source.textContent);
        button.textContent = "Copied";
      } catch {
        window.getSelection().selectAllChildren(source);
        button.textContent = document.execCommand("copy") ? "Copied" : "Selected: press Ctrl+C";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 2500);
    });
  }

  // Says what lies beyond the edges; a table that scrolls does not look like one.
  function makeHint(card) {
    const hint = card.querySelector(".more");
    const box = card.querySelector(".scroll");
    const below = card.querySelector(".below");
    if (!box) return;
    const tell = () => {
      const edge = box.getBoundingClientRect().right;
      const beyond = [...box.querySelectorAll("thead th")].filter((head) => head.getBoundingClientRect().right > edge + 12).length;
      hint.hidden = beyond === 0;
      card.classList.toggle("has-more", beyond > 0);
      const under = below !== null && box.scrollHeight - box.clientHeight - box.scrollTop > 12;
      card.classList.toggle("has-below", under);
      if (below) below.hidden = !under;
      hint.textContent = `${beyond} more column${beyond === 1 ? "" : "s"}: scroll sideways →`;
    };
    box.addEventListener("scroll", tell, { passive: true });
    new ResizeObserver(tell).observe(box);
    new ResizeObserver(tell).observe(box.firstElementChild); // rows that a filter hides
  }

  // Shows one of several forms of the same text; without a script all of them stand below each other.
  function makeTabs(chooser) {
    const tabs = chooser.parentElement.querySelectorAll(".tab");
    const choose = () => {
      const chosen = chooser.querySelector("input:checked").value;
      tabs.forEach((tab) => { tab.hidden = tab.dataset.tab !== chosen; });
    };
    chooser.addEventListener("change", choose);
    choose();
  }

  document.querySelectorAll(".tabs").forEach(makeTabs);
  document.querySelectorAll(".table-card").forEach(makeHint);
  document.querySelectorAll("table.sortable").forEach(makeSortable);
  document.querySelectorAll(".table-card:has(.filter)").forEach(makeFilter);
  document.querySelectorAll("button.copy").forEach(makeCopy);

  const figures = [...document.querySelectorAll("figure[data-panel]")]
    .filter((element) => source.panels[element.dataset.panel])
    .map((element) => new Figure(element));
  let draws = 0;
  const drawAll = async () => {
    const draw = ++draws;
    delete root.dataset.drawn;
    for (const figure of figures) {
      await figure.draw();
      await new Promise((resolve) => setTimeout(resolve)); // let the page answer between figures
      if (draw !== draws) return; // a newer one goes through all figures again
    }
    root.dataset.drawn = "true";
  };

  const toggle = document.querySelector("button.theme");
  const show = () => toggle.setAttribute("aria-pressed", String(isDark()));
  toggle.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("ppas-theme", root.dataset.theme); } catch { /* not kept, still switched */ }
    show();
    drawAll();
  });
  system.addEventListener("change", () => { show(); drawAll(); });
  narrow.addEventListener("change", drawAll);
  show();
  drawAll();
})();

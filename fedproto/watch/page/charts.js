// Line charts by uPlot: hover or arrow keys for values, buttons to toggle lines and the log axis.

import { css, plain } from "./format.js";
import { h, numbers, table } from "./dom.js";

const CHART_HEIGHT = 240;
const MAX_TABLE_ROWS = 250;
const MAX_TICKS = 12;
const LABEL_WIDTH = 62; // of the vertical axis, if its labels need no more

export class LineChart {
  #plot = null;
  #hidden = new Set();
  #isLog = false;
  #known = new Set();
  #shape = "";

  // options: title, xLabel, format(value), limits [low, high] that bands are cut at, canLog
  constructor(options) {
    this.options = { format: plain, xLabel: "round", ...options };
    this.legend = h("div", { class: "legend" });
    this.box = h("div", { class: "plot", tabindex: "0", role: "img", "aria-label": options.title });
    this.box.addEventListener("keydown", (event) => this.#move(event));
    this.log = h("button", { type: "button", class: "log", "aria-pressed": "false", onclick: () => this.#toggleLog() }, "log axis");
    this.element = h("figure", null,
      h("figcaption", null, options.title),
      options.canLog ? this.log : null,
      this.box, this.legend, numbers(() => this.#table()));
    new ResizeObserver(() => this.#resize()).observe(this.box);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.#shape = "";
      this.#draw();
    });
  }

  // lines: [{label, values, std, colour, dash, isHidden}] over the same x; isHidden: at first
  update(x, lines) {
    for (const line of lines) if (line.isHidden && !this.#known.has(line.label)) this.#hidden.add(line.label);
    for (const line of lines) this.#known.add(line.label);
    this.x = x;
    this.lines = lines;
    this.#draw();
  }

  #visible() {
    return this.lines.filter((line) => !this.#hidden.has(line.label));
  }

  #draw() {
    if (!this.x) return;
    const visible = this.#visible();
    const data = [this.x];
    for (const line of visible) {
      data.push(line.values);
      if (line.std) data.push(this.#edge(line, 1), this.#edge(line, -1));
    }
    const shape = JSON.stringify([this.#isLog, this.#ticks(visible), visible.map((line) => [line.label, line.colour, line.dash, !!line.std])]);
    if (this.#plot && shape === this.#shape) {
      this.#plot.setData(data);
    } else {
      this.#plot?.destroy();
      this.#plot = new uPlot(this.#configure(visible), data, this.box);
      this.#shape = shape;
    }
    this.#showLegend(null);
  }

  #edge(line, sign) {
    const [low, high] = this.options.limits ?? [-Infinity, Infinity];
    return line.values.map((value, index) => {
      const std = line.std[index];
      return value == null || std == null ? null : Math.min(high, Math.max(low, value + sign * std));
    });
  }

  #configure(visible) {
    const ink = css("--soft");
    const grid = { stroke: css("--line"), width: 1 };
    const format = this.options.format;
    const series = [{}];
    const bands = [];
    const ticks = this.#ticks(visible);
    for (const line of visible) {
      series.push({ label: line.label, stroke: line.colour, dash: line.dash, width: 2, spanGaps: true, points: { show: this.x.length <= 60 && line.values.some((value) => value == null) || this.x.length === 1 } });
      if (line.std) {
        const edge = { stroke: "transparent", width: 0, points: { show: false }, spanGaps: true };
        bands.push({ series: [series.length, series.length + 1], fill: `${line.colour}22` });
        series.push(edge, edge);
      }
    }
    return {
      width: Math.max(200, this.box.clientWidth),
      height: CHART_HEIGHT,
      legend: { show: false },
      cursor: { drag: { x: true, y: false }, y: false },
      scales: { x: { time: false, distr: this.options.canLogX ? 3 : 1, range: (plot, low, high) => low === high ? (this.options.canLogX ? [low / 2, high * 2] : [low - 1, high + 1]) : [low, high] }, y: { distr: this.#isLog ? 3 : 1 } },
      series,
      bands,
      axes: [
        { stroke: ink, grid, ticks: grid, label: this.options.xLabel, labelSize: 18, size: 32, splits: ticks && (() => ticks), values: (plot, splits) => splits.map((value) => (value == null ? "" : plain(value))) },
        { stroke: ink, grid, ticks: grid, size: labelWidth, values: (plot, splits) => splits.map((value) => (value == null ? "" : format(value))) },
      ],
      hooks: { setCursor: [(plot) => this.#showLegend(plot.cursor.idx)] },
    };
  }

  // A tick per evaluation where there are few; undefined: what fits.
  #ticks(visible) {
    const measured = this.x.filter((_, index) => visible.some((line) => line.values[index] != null));
    return measured.length > 0 && measured.length <= MAX_TICKS ? measured : undefined;
  }

  #showLegend(index) {
    const last = this.x.length - 1;
    const items = this.lines.map((line) => {
      let at = index ?? last;
      if (index == null) while (at > 0 && line.values[at] == null) at -= 1;
      const value = line.values[at];
      const std = line.std?.[at];
      const spread = std == null ? "" : ` ± ${this.options.format(std)}`;
      return `${value == null ? "–" : this.options.format(value)}${value == null ? "" : spread}`;
    });
    const round = this.x.length ? this.x[index ?? last] : null;
    const labels = this.lines.map((line) => line.label).join("\n");
    if (this.legend.dataset.labels !== labels) this.#makeLegend(labels);
    [...this.legend.querySelectorAll("button")].forEach((button, at) => {
      button.querySelector(".value").textContent = items[at];
      button.style.setProperty("--line-colour", this.lines[at].colour);
    });
    this.legend.querySelector(".at").textContent = round == null ? "" : `${this.options.xLabel} ${round}`;
  }

  #makeLegend(labels) {
    this.legend.dataset.labels = labels;
    const buttons = this.lines.map((line) =>
      h("button", { type: "button", "aria-pressed": String(!this.#hidden.has(line.label)), onclick: (event) => this.#toggle(line.label, event.currentTarget) },
        h("span", { class: "swatch", "data-dash": String(line.dash.length) }), h("span", null, line.label), h("span", { class: "value" })));
    this.legend.replaceChildren(h("span", { class: "at" }), ...buttons);
  }

  #toggle(label, button) {
    if (this.#hidden.has(label)) this.#hidden.delete(label);
    else this.#hidden.add(label);
    button.setAttribute("aria-pressed", String(!this.#hidden.has(label)));
    this.#draw();
  }

  #toggleLog() {
    this.#isLog = !this.#isLog;
    this.log.setAttribute("aria-pressed", String(this.#isLog));
    this.#draw();
  }

  // Arrow keys, Home and End move the cursor over the rounds.
  #move(event) {
    const last = this.x.length - 1;
    const from = this.#plot.cursor.idx ?? last;
    const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const index = Math.min(last, Math.max(0, to));
    this.#plot.setCursor({ left: this.#plot.valToPos(this.x[index], "x"), top: 0 });
  }

  #resize() {
    if (this.#plot && this.box.clientWidth > 0) this.#plot.setSize({ width: Math.max(200, this.box.clientWidth), height: CHART_HEIGHT });
  }

  #table() {
    const measured = this.x.map((_, index) => index).filter((index) => this.lines.some((line) => line.values[index] != null));
    const step = Math.ceil(measured.length / MAX_TABLE_ROWS);
    const shown = measured.filter((_, at) => at % step === 0 || at === measured.length - 1);
    const rows = shown.map((index) => [String(this.x[index]), ...this.lines.map((line) => this.options.format(line.values[index] ?? null))]);
    const every = step > 1 ? `, every ${step}th` : "";
    return table(`${this.options.title}${every}`, [this.options.xLabel, ...this.lines.map((line) => line.label)], rows);
  }
}

// What an axis needs for its longest label; uPlot asks several times per drawing.
function labelWidth(plot, labels, axisIndex) {
  const axis = plot.axes[axisIndex];
  plot.ctx.font = axis.font[0];
  const widths = (labels ?? []).map((label) => plot.ctx.measureText(label ?? "").width / devicePixelRatio);
  return Math.ceil(Math.max(LABEL_WIDTH, axis.ticks.size + axis.gap + Math.max(0, ...widths)));
}

// Columns of several runs over the union of their rounds.
export function align(lists) {
  const x = [...new Set(lists.flatMap((list) => list.x))].sort((a, b) => a - b);
  const place = new Map(x.map((value, index) => [value, index]));
  const spread = (from, values) => {
    const to = x.map(() => null);
    from.forEach((value, index) => { to[place.get(value)] = values[index]; });
    return to;
  };
  return { x, values: lists.map((list) => list.columns.map((column) => column && spread(list.x, column))) };
}

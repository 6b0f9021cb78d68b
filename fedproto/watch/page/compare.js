// Ticked runs side by side: curves, each client's gain over local training, differing settings.

import { align, LineChart } from "./charts.js";
import { bytes, count, duration, lookOf, percent, points, wayName } from "./format.js";
import { choice, h, note, numbers, pictureWidth, section, svg, table } from "./dom.js";
import { bestByValidation, sweepPicture } from "./sweep.js";

// The looks of several runs: methods have their colours, runs of one method shades and dashes.
export function looksOf(runs) {
  const seen = new Map();
  return runs.map((run) => {
    const nth = seen.get(run.method) ?? 0;
    seen.set(run.method, nth + 1);
    return lookOf(run.look, nth);
  });
}

function accuracyOf(client, way) {
  return client.accuracy[way] ?? client.accuracy.head ?? Object.values(client.accuracy)[0];
}

// The gain of each client of a run over the same client of a local run.
export function gains(run, local, way) {
  const alone = new Map(local.clients.map((client) => [client.name, accuracyOf(client, "head")]));
  return run.clients.map((client) => ({ name: client.name, gain: accuracyOf(client, way) - alone.get(client.name) })).filter((each) => Number.isFinite(each.gain));
}

function countSigns(list) {
  const better = list.filter((each) => each.gain > 1e-9).length;
  const worse = list.filter((each) => each.gain < -1e-9).length;
  return `${better} better, ${list.length - better - worse} equal, ${worse} worse`;
}

// Clients down, methods as dots; the axis is zoomed to the gains.
export function gainPlot(entries, title) {
  const order = [...entries[0].gains].sort((a, b) => b.gain - a.gain).map((each) => each.name);
  const names = [...new Set([...order, ...entries.flatMap((entry) => entry.gains.map((each) => each.name))])];
  const row = names.length > 60 ? 6 : 18;
  const left = names.length > 60 ? 10 : 110;
  const width = pictureWidth();
  const height = names.length * row + 40;
  const values = entries.flatMap((entry) => entry.gains.map((each) => each.gain));
  const low = Math.min(0, ...values);
  const high = Math.max(0, ...values);
  const pad = (high - low || 0.01) * 0.05;
  const x = (value) => left + ((value - low + pad) / (high - low + 2 * pad)) * (width - left - 10);
  const place = new Map(names.map((name, index) => [name, 8 + (index + 0.5) * row]));
  const ticks = niceTicks(low, high).map((value) => svg("g", null,
    svg("line", { x1: x(value), x2: x(value), y1: 4, y2: height - 28, class: value === 0 ? "reference" : "gridline" }),
    svg("text", { x: x(value), y: height - 14, "text-anchor": "middle" }, points(value))));
  const labels = names.length > 60 ? [] : names.map((name) => svg("text", { x: left - 8, y: place.get(name) + 4, "text-anchor": "end" }, name.length > 14 ? `${name.slice(0, 13)}…` : name));
  const dots = entries.flatMap((entry) => entry.gains.map((each) =>
    svg("circle", { cx: x(each.gain), cy: place.get(each.name), r: names.length > 60 ? 2.5 : 4.5, fill: entry.look.colour, class: "dot" }, svg("title", null, `${entry.label}, client ${each.name}: ${points(each.gain)} points`))));
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "gains", role: "img", "aria-label": title }, ticks, labels, dots,
    svg("text", { x: width, y: height - 2, "text-anchor": "end" }, "percentage points over local training"));
  const rows = names.map((name) => [name, ...entries.map((entry) => points(entry.gains.find((each) => each.name === name)?.gain))]);
  return h("figure", null, h("figcaption", null, title), picture,
    h("div", { class: "legend" }, entries.map((entry) => h("span", { "--line-colour": entry.look.colour }, h("span", { class: "swatch" }), `${entry.label}: ${countSigns(entry.gains)}`))),
    numbers(() => table(title, ["client", ...entries.map((entry) => entry.label)], rows)));
}

function niceTicks(low, high) {
  const raw = (high - low || 0.01) / 6;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= raw);
  const ticks = [];
  for (let at = Math.ceil(low / step); at * step <= high + 1e-12; at += 1) ticks.push(at === 0 ? 0 : at * step);
  return ticks;
}

// Settings in which runs differ; the seed among them.
export function differences(runs) {
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))];
  return keys.filter((key) => new Set(runs.map((run) => run.settings[key])).size > 1);
}

export class Compare {
  constructor() {
    this.chart = new LineChart({ title: "Accuracy, mean over clients ± standard deviation", format: percent, limits: [0, 1] });
    this.loss = new LineChart({ title: "Loss of the classifier, mean over clients", canLog: true });
    this.way = null;
    this.rest = h("div");
    this.choice = h("div", { class: "controls" });
    this.element = section("compare", "Comparison", this.choice, h("div", { class: "charts" }, this.chart.element, this.loss.element), this.rest);
    this.element.hidden = true;
  }

  update(runs) {
    this.element.hidden = runs.length < 2;
    if (runs.length < 2) return;
    this.runs = runs;
    const looks = looksOf(runs);
    const ways = [...new Set(runs.flatMap((run) => Object.keys(run.accuracy)))].filter((way) => !way.endsWith("_own"));
    const way = ways.includes(this.way) ? this.way : ways.includes("prototype") ? "prototype" : ways[0];
    this.way = way;
    const choose = (value) => {
      this.way = value;
      this.update(this.runs);
    };
    this.choice.replaceChildren(ways.length > 1 ? choice("Predicted by", ways.map((each) => [each, wayName(each)]), way, choose) : "");
    this.#curves(this.chart, runs, looks, (run) => [`accuracy/${usable(run, way)}/mean`, `accuracy/${usable(run, way)}/std`], (run) => labelOf(run, way));
    this.#curves(this.loss, runs, looks, () => ["loss/supervised/mean"], (run) => run.name);
    this.rest.replaceChildren(...this.#rest(runs, looks, way));
  }

  #curves(chart, runs, looks, columnsOf, labelOf) {
    const lists = runs.map((run) => ({ x: run.series.rounds, columns: columnsOf(run).map((name) => run.series.columns[name]) }));
    const { x, values } = align(lists);
    const lines = runs.map((run, index) => ({ label: labelOf(run), values: values[index][0] ?? x.map(() => null), std: values[index][1], ...looks[index] }));
    chart.update(x, lines);
  }

  #rest(runs, looks, way) {
    const parts = [this.#summary(runs, way), bestByValidation(runs), sweepPicture(runs, differences(runs), (run) => run.accuracy[usable(run, way)]?.mean)];
    const locals = runs.filter((run) => run.method === "local" && run.clients.some((client) => Object.keys(client.accuracy).length));
    const entries = [];
    runs.forEach((run, index) => {
      const local = locals.find((each) => each !== run && each.partition && each.partition === run.partition);
      if (local && run.method !== "local") entries.push({ label: labelOf(run, way), look: looks[index], gains: gains(run, local, usable(run, way)) });
    });
    const withGains = entries.filter((entry) => entry.gains.length);
    if (withGains.length) parts.push(gainPlot(withGains, "Each client's gain over local training"));
    else parts.push(note("Tick a finished run of the method “local” with the same partition to see each client's gain over local training."));
    parts.push(this.#differences(runs));
    return parts.filter(Boolean);
  }

  #summary(runs, way) {
    const rows = runs.map((run) => {
      const spread = run.accuracy[usable(run, way)];
      const worst = run.metrics.ways[usable(run, way)]?.summaries.accuracy;
      return [labelOf(run, way), spread ? `${percent(spread.mean)} ± ${percent(spread.std)}` : "–", run.method, worst?.worst == null ? "–" : percent(worst.worst), String(run.rounds_done), bytes(run.bytes_up), bytes(run.bytes_down), duration(run.seconds)];
    });
    const header = ["run", `accuracy, ${wayName(way)}`, "method", "worst client", "rounds", "sent by clients", "sent to clients", "time"];
    const kept = header.map((_, index) => index).filter((index) => index < 2 || new Set(rows.map((row) => row[index])).size > 1);
    return table("Ticked runs; columns in which all are equal are left out", kept.map((index) => header[index]), rows.map((row) => kept.map((index) => row[index])));
  }

  #differences(runs) {
    const keys = differences(runs);
    if (!keys.length) return note("The runs have the same settings.");
    const rows = keys.map((key) => [key, ...runs.map((run) => run.settings[key] ?? "–")]);
    return h("div", null, h("h3", null, `${count(keys.length, "setting")} in which they differ`), table("Settings in which the runs differ", ["setting", ...runs.map((run) => run.name)], rows, { hideCaption: true }));
  }
}

// A run's name, with the way it predicts if that is not the chosen one.
function labelOf(run, way) {
  const own = usable(run, way);
  return own === way || own === undefined ? run.name : `${run.name} (${wayName(own)})`;
}

// The head's accuracy stands in where a run does not predict that way.
function usable(run, way) {
  return way in run.accuracy ? way : "head" in run.accuracy ? "head" : Object.keys(run.accuracy)[0];
}

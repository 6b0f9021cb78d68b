// Runs that differ in one or two numbers: accuracy against a setting, or a heat map over two.

import { LineChart } from "./charts.js";
import { lookOf, percent, plain } from "./format.js";
import { h, note } from "./dom.js";

const NOT_SWEPT = new Set(["seed", "stack"]);

function mean(values) {
  const known = values.filter((value) => value != null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

// The settings in which runs differ: numbers, and others, which tell lines apart.
export function sweptSettings(runs, keys) {
  const varied = keys.filter((key) => !NOT_SWEPT.has(key));
  const isNumber = (key) => runs.every((run) => run.settings[key] !== undefined && run.settings[key] !== "" && Number.isFinite(Number(run.settings[key])));
  return { numbers: varied.filter(isNumber), others: varied.filter((key) => !isNumber(key)) };
}

// The element that shows a sweep, or null where the runs are none.
export function sweepPicture(runs, keys, accuracy) {
  const { numbers, others } = sweptSettings(runs, keys);
  const isOneMethod = others.length === 0;
  if (numbers.length === 1) return axisChart(runs, numbers[0], accuracy);
  if (numbers.length === 2 && isOneMethod) return heatMap(runs, numbers, accuracy);
  return null;
}

function axisChart(runs, key, accuracy) {
  const x = [...new Set(runs.map((run) => Number(run.settings[key])))].sort((a, b) => a - b);
  const methods = [...new Set(runs.map((run) => run.method))];
  const lines = methods.map((method) => {
    const own = runs.filter((run) => run.method === method);
    const at = (value) => own.filter((run) => Number(run.settings[key]) === value).map(accuracy);
    return { label: method, values: x.map((value) => mean(at(value))), ...lookOf(own[0].look) };
  });
  const chart = new LineChart({ title: `Accuracy against ${key}, mean over clients and seeds`, xLabel: key, format: percent, canLogX: x[0] > 0 });
  queueMicrotask(() => chart.update(x, lines));
  return chart.element;
}

function heatMap(runs, [first, second], accuracy) {
  const valuesOf = (key) => [...new Set(runs.map((run) => Number(run.settings[key])))].sort((a, b) => a - b);
  const cell = (a, b) => mean(runs.filter((run) => Number(run.settings[first]) === a && Number(run.settings[second]) === b).map(accuracy));
  const all = runs.map(accuracy).filter((value) => value != null);
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const share = (value) => (value == null ? "0" : ((value - low) / (high - low || 1)).toFixed(3));
  const columns = valuesOf(second);
  const rows = valuesOf(first).map((a) => h("tr", null, h("th", { scope: "row" }, plain(a)), columns.map((b) => h("td", { class: "heat right", "--share": share(cell(a, b)) }, percent(cell(a, b))))));
  const caption = `Accuracy, mean over clients and seeds: ${first} (rows) and ${second} (columns)`;
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", { class: "matrix" }, h("caption", null, h("span", null, caption)),
      h("thead", null, h("tr", null, h("th", { scope: "col" }, first), columns.map((b) => h("th", { scope: "col" }, plain(b))))), h("tbody", null, rows)));
}

export function bestByValidation(runs) {
  const judged = runs.filter((run) => run.validation != null);
  if (judged.length < 2) return null;
  const best = judged.reduce((a, b) => (b.validation > a.validation ? b : a));
  return note(`Best by validation: ${best.name}, ${percent(best.validation)} on validation rows.`);
}

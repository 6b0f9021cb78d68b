// How good the predictions are: metrics, confusion matrices, recall per class, calibration.

import { percent, wayName } from "./format.js";
import { choice, h, note, numbers, section, svg, table } from "./dom.js";

const METRICS = {
  accuracy: ["accuracy", percent],
  balanced_accuracy: ["balanced accuracy", percent],
  macro_f1: ["macro F1", percent],
  auroc: ["AUROC", percent],
  brier: ["Brier score", (value) => (value == null ? "–" : value.toFixed(3))],
  ece: ["calibration error", percent],
};
const BASELINES = { majority: "always the client's most frequent class", local: "training alone", pooled: "training on all rows in one place" };
const MAX_MATRIX = 40;

// Rows are true classes, columns predicted ones; the shade is the share of the row.
export function confusionTable(matrix, names, caption) {
  const used = names.map((_, index) => index).filter((index) => matrix[index]?.some((value) => value > 0) || matrix.some((row) => row[index] > 0));
  const shown = used.slice(0, MAX_MATRIX);
  const rows = shown.map((label) => {
    const total = matrix[label].reduce((sum, value) => sum + value, 0);
    const cells = shown.map((other) => {
      const value = matrix[label][other];
      const share = total ? value / total : 0;
      return h("td", { "--share": share.toFixed(3), class: label === other ? "heat right" : "heat wrong", title: `${names[label]} taken for ${names[other]}: ${value} of ${total}` }, value ? String(value) : "");
    });
    return h("tr", null, h("th", { scope: "row" }, names[label]), cells);
  });
  const head = h("tr", null, h("th", { scope: "col" }, "true class"), shown.map((label) => h("th", { scope: "col" }, names[label])));
  const content = h("table", { class: "matrix" }, h("caption", null, h("span", null, caption)), h("thead", null, head), h("tbody", null, rows));
  const cut = used.length > shown.length ? note(`The first ${shown.length} of ${used.length} classes.`) : null;
  return h("div", null, h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption }, content), cut);
}

// A bar per class with its value, which is also its table.
export function recallBars(recall, caption) {
  const rows = Object.entries(recall).map(([name, value]) =>
    h("tr", null, h("th", { scope: "row" }, name), h("td", { class: "bar", "--done": String(value ?? 0) }, percent(value))));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", { class: "bars" }, h("caption", null, h("span", null, caption)), h("thead", null, h("tr", null, h("th", { scope: "col" }, "class"), h("th", { scope: "col" }, "recall"))), h("tbody", null, rows)));
}

// Accuracy against confidence; on the diagonal, a confidence of 80% is right in 80% of cases.
export function reliability(bins, title) {
  const size = 260;
  const place = (value) => 40 + value * (size - 58);
  const up = (value) => size - place(value);
  const most = Math.max(...bins.map((bin) => bin.rows));
  const dots = bins.map((bin) => svg("circle", { cx: place(bin.confidence), cy: up(bin.accuracy), r: 3 + 7 * Math.sqrt(bin.rows / most) },
    svg("title", null, `confidence ${percent(bin.confidence)}, right ${percent(bin.accuracy)}, ${bin.rows} rows`)));
  const ticks = [0, 0.5, 1].map((value) => [
    svg("text", { x: place(value), y: size - 14, "text-anchor": "middle" }, percent(value, 0)),
    svg("text", { x: 36, y: up(value) + 4, "text-anchor": "end" }, percent(value, 0)),
  ]);
  const picture = svg("svg", { viewBox: `0 0 ${size} ${size}`, class: "reliability", role: "img", "aria-label": title },
    svg("line", { x1: place(0), y1: up(0), x2: place(1), y2: up(1), class: "reference" }), dots, ticks,
    svg("text", { x: place(0.5), y: size - 2, "text-anchor": "middle" }, "confidence"));
  const rows = bins.map((bin) => [percent(bin.confidence), percent(bin.accuracy), String(bin.rows)]);
  return h("figure", null, h("figcaption", null, title), picture, numbers(() => table(title, ["confidence", "right", "rows"], rows)));
}

function metricTable(run) {
  const { ways, baselines } = run.metrics;
  const entries = Object.entries(ways).filter(([way]) => !way.endsWith("_own")).map(([way, each]) => [wayName(way), each.summaries]);
  for (const [name, each] of Object.entries(baselines)) {
    if (each.summaries) entries.push([`for comparison: ${BASELINES[name] ?? name}`, each.summaries]);
  }
  const present = Object.keys(METRICS).filter((name) => entries.some(([, summaries]) => summaries[name]?.mean != null));
  const rows = entries.map(([label, summaries]) => {
    const cells = present.map((name) => {
      const value = summaries[name];
      if (value?.mean == null) return "–";
      const format = METRICS[name][1];
      return `${format(value.mean)} ± ${format(value.std)}`;
    });
    const worst = summaries.accuracy;
    return [label, ...cells, worst?.worst == null ? "–" : `${percent(worst.worst)} (client ${worst.worst_client})`];
  });
  return table("Mean over clients ± standard deviation over clients, on test rows", ["predicted by", ...present.map((name) => METRICS[name][0]), "worst client"], rows);
}

export class Quality {
  constructor() {
    this.element = h("div");
    this.way = null;
  }

  update(run) {
    this.run = run;
    const ways = Object.keys(run.metrics.ways);
    this.element.hidden = ways.length === 0;
    if (ways.length) this.#draw(ways);
  }

  #draw(ways) {
    const shown = ways.filter((way) => !way.endsWith("_own"));
    const way = shown.includes(this.way) ? this.way : shown.includes(this.run.main) ? this.run.main : shown[0];
    const found = this.run.metrics.ways[way];
    const choose = (value) => {
      this.way = value;
      this.#draw(ways);
    };
    const missing = Object.entries(this.run.metrics.baselines).filter(([, each]) => each.missing)
      .map(([name, each]) => note(`There is no comparison with ${BASELINES[name] ?? name}: ${each.missing}.`));
    this.element.replaceChildren(section("quality", "Predictions",
      metricTable(this.run),
      note("Balanced accuracy is the mean recall of the classes. AUROC is the chance that a row of a class gets a higher score for it than a row of another class. The Brier score and the calibration error are better when they are smaller."),
      missing,
      shown.length > 1 ? choice("Predicted by", shown.map((each) => [each, wayName(each)]), way, choose) : null,
      h("div", { class: "pair" },
        found.confusion ? confusionTable(found.confusion, this.run.classes, `All clients' test rows by true class (row) and predicted class (column), ${wayName(way)}`) : null,
        h("div", null,
          recallBars(found.recall, "Recall: the share of a class's test rows that is recognised"),
          found.bins.length ? reliability(found.bins, "Reliability: how often predictions of a confidence are right") : null))));
  }
}

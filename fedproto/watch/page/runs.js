// The list of runs: progress, accuracy, traffic; ticked ones are compared.

import { bytes, count, duration, lookOf, percent, STATES } from "./format.js";
import { h } from "./dom.js";

// Columns: heading, cell, what it is sorted by.
const COLUMNS = [
  ["run", null, (run) => run.name],
  ["accuracy", (run) => percent(mainAccuracy(run)), (run) => mainAccuracy(run)],
  ["rounds", (run) => roundsOf(run), (run) => run.rounds_done],
  ["state", (run) => stateOf(run), (run) => run.state],
  ["method", (run) => run.method, (run) => run.method],
  ["data set", (run) => run.dataset, (run) => run.dataset],
  ["seed", (run) => run.seed ?? "–", (run) => run.seed],
  ["sent by clients", (run) => bytes(run.bytes_up), (run) => run.bytes_up],
  ["sent to clients", (run) => bytes(run.bytes_down), (run) => run.bytes_down],
  ["time left", (run) => (run.state === "running" ? duration(run.seconds_left) : "–"), (run) => run.seconds_left],
];
// Columns that are left out where they say the same of all runs.
const OPTIONAL = new Set(["data set", "seed", "time left", "sent by clients", "sent to clients"]);

export function mainAccuracy(run) {
  const way = ["prototype", "head"].find((name) => name in run.accuracy) ?? Object.keys(run.accuracy)[0];
  return run.accuracy[way]?.mean;
}

function roundsOf(run) {
  return run.rounds_planned ? `${run.rounds_done} of ${run.rounds_planned}` : String(run.rounds_done);
}

function stateOf(run) {
  return h("span", { class: `state ${run.state}` }, run.problems.length ? `${STATES[run.state]}, see below` : STATES[run.state]);
}

export class RunList {
  #sort = ["run", 1];
  #filter = "";

  constructor(onopen, ontick) {
    this.onopen = onopen;
    this.ontick = ontick;
    this.ticked = new Set();
    this.current = null;
    this.runs = [];
    this.body = h("tbody");
    this.head = h("tr");
    this.text = h("span");
    this.search = h("input", { type: "search", placeholder: "filter by name, method or state", "aria-label": "Filter runs", oninput: () => { this.#filter = this.search.value.toLowerCase(); this.#draw(); } });
    const box = h("table", { class: "runs" }, h("caption", null, this.text), h("thead", null, this.head), this.body);
    this.element = h("section", { "aria-labelledby": "runs" }, h("h2", { id: "runs" }, "Runs"), this.search,
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Runs" }, box));
  }

  update(runs) {
    this.runs = runs;
    this.element.hidden = runs.length === 1 && runs[0].id === this.current;
    this.search.hidden = runs.length < 6;
    this.#draw();
  }

  #shown() {
    const [heading, sign] = this.#sort;
    const key = COLUMNS.find((column) => column[0] === heading)[2];
    const matching = this.runs.filter((run) => `${run.name} ${run.method} ${run.state}`.toLowerCase().includes(this.#filter));
    return matching.sort((a, b) => sign * compareKeys(key(a), key(b)));
  }

  #columns() {
    return COLUMNS.filter(([heading, , key]) => {
      if (!OPTIONAL.has(heading) || this.runs.length < 2) return true;
      return new Set(this.runs.map(key)).size > 1;
    });
  }

  #draw() {
    const focused = document.activeElement?.dataset?.key;
    const columns = this.#columns();
    this.text.textContent = `${count(this.runs.length, "run")}. Tick two or more to compare them.`;
    this.head.replaceChildren(...columns.map((column) => this.#heading(column[0])));
    this.body.replaceChildren(...this.#shown().map((run) => this.#row(run, columns)));
    if (focused) document.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  #heading(name) {
    const [current, sign] = this.#sort;
    const direction = current === name ? (sign > 0 ? "ascending" : "descending") : "none";
    const onclick = () => {
      this.#sort = [name, current === name ? -sign : 1];
      this.#draw();
    };
    return h("th", { scope: "col", "aria-sort": direction }, h("button", { type: "button", "data-key": `sort-${name}`, onclick }, name));
  }

  #row(run, columns) {
    const tick = h("input", { type: "checkbox", "data-key": `tick-${run.id}`, "aria-label": `Compare ${run.name}`, onchange: (event) => this.#tick(run.id, event.target.checked) });
    tick.checked = this.ticked.has(run.id);
    const open = h("button", { type: "button", class: "link", "data-key": `open-${run.id}`, onclick: () => this.onopen(run.id) }, run.name);
    const swatch = h("span", { class: "swatch", "--line-colour": lookOf(run.look).colour });
    const first = h("th", { scope: "row" }, tick, swatch, open);
    const cells = columns.slice(1).map(([heading, cell]) => h("td", heading === "rounds" ? { "--done": String(run.rounds_planned ? run.rounds_done / run.rounds_planned : 0), class: "bar" } : null, cell(run)));
    return h("tr", { "aria-current": run.id === this.current ? "true" : null }, first, cells);
  }

  #tick(id, isTicked) {
    if (isTicked) this.ticked.add(id);
    else this.ticked.delete(id);
    this.ontick([...this.ticked]);
  }
}

export function compareKeys(a, b) {
  if (a == null || b == null) return (a == null) - (b == null);
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}

// Clients × classes as a table that can be sorted and filtered; a page of it at a time.

import { ago, bytes, count, percent, wayName } from "./format.js";
import { choice, h, note, section } from "./dom.js";
import { compareKeys } from "./runs.js";

const PAGE_ROWS = 25;
const MAX_CLASSES = 24;

export class ClientGrid {
  #sort = ["client", 1];
  #filter = "";
  #page = 0;
  #what = "recall";
  #way = null;
  #firstClass = 0;
  #drawn = "";

  constructor(onopen) {
    this.onopen = onopen;
    this.search = h("input", { type: "search", placeholder: "filter by client, model or class", "aria-label": "Filter clients", oninput: () => { this.#filter = this.search.value.toLowerCase(); this.#page = 0; this.#draw(); } });
    this.controls = h("div", { class: "controls" });
    this.text = h("span");
    this.head = h("tr");
    this.body = h("tbody");
    this.pager = h("div", { class: "pager", role: "group", "aria-label": "Pages of clients" });
    this.note = note("");
    const grid = h("table", { class: "grid" }, h("caption", null, this.text), h("thead", null, this.head), this.body);
    this.element = section("clients", "Clients and classes", this.search, this.controls,
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Clients and classes" }, grid), this.pager, this.note);
  }

  update(run) {
    this.run = run;
    this.element.hidden = run.clients.length === 0;
    const key = JSON.stringify([run.id, run.clients, run.classes]);
    if (key !== this.#drawn) this.#draw();
    this.#drawn = key;
  }

  #columns() {
    const { run } = this;
    const ways = Object.keys(run.clients[0]?.accuracy ?? {}).filter((way) => !way.endsWith("_own") || !(way.slice(0, -4) in run.clients[0].accuracy));
    this.#way = ways.includes(this.#way) ? this.#way : ways.includes(run.main) ? run.main : ways[0];
    const columns = [["client", (client) => client.name, (client) => client.name]];
    if (ways.length) columns.push(["accuracy", (client) => percent(client.accuracy[this.#way]), (client) => client.accuracy[this.#way]]);
    if (run.kind === "run") {
      columns.push(["rows", (client) => client.train ?? "–", (client) => client.train]);
      columns.push(["test rows", (client) => client.test ?? "–", (client) => client.test]);
      columns.push(["last round", (client) => client.last_round || "–", (client) => client.last_round]);
    } else {
      columns.push(["last seen", (client) => ago(client.last_seen), (client) => client.last_seen]);
      columns.push(["last round", (client) => client.last_round || "–", (client) => client.last_round]);
      columns.push(["refused", (client) => String(client.refused), (client) => client.refused]);
      columns.push(["failed", (client) => String(client.failed), (client) => client.failed]);
    }
    if (run.clients.some((client) => client.traffic?.bytes_up != null)) columns.push(["sent", (client) => bytes(client.traffic?.bytes_up), (client) => client.traffic?.bytes_up]);
    this.ways = ways;
    return columns;
  }

  #classValue(client, name) {
    const at = client.classes.indexOf(name);
    if (this.#what === "recall") return client.recall[this.#way]?.[name];
    return at < 0 ? null : client.rows?.[at] ?? null;
  }

  #draw() {
    const { run } = this;
    const columns = this.#columns();
    const hasRecall = run.clients.some((client) => Object.keys(client.recall).length);
    const hasRows = run.clients.some((client) => client.rows);
    if (this.#what === "recall" && !hasRecall) this.#what = hasRows ? "rows" : "held";
    if (this.#what === "held" && hasRecall) this.#what = "recall";
    const classes = run.classes.slice(this.#firstClass, this.#firstClass + MAX_CLASSES);
    const shown = this.#select(columns);
    const pages = Math.max(1, Math.ceil(shown.length / PAGE_ROWS));
    this.#page = Math.min(this.#page, pages - 1);
    const rows = shown.slice(this.#page * PAGE_ROWS, (this.#page + 1) * PAGE_ROWS);
    const largest = Math.max(1, ...run.clients.flatMap((client) => client.rows ?? []));
    const focused = document.activeElement?.dataset?.key;
    this.#drawControls(hasRecall, hasRows);
    this.text.textContent = `${count(shown.length, "client")}; a column per class shows ${{ recall: "recall", rows: "training rows", held: "which classes a client has" }[this.#what]}. Choose a client for its details.`;
    this.head.replaceChildren(...columns.map(([name]) => this.#heading(name, name)), ...classes.map((name) => this.#heading(`class ${name}`, name)));
    this.body.replaceChildren(...rows.map((client) => this.#row(client, columns, classes, largest)));
    this.#drawPager(shown.length, pages);
    this.note.textContent = run.state === "finished" || run.kind === "deployed" ? "" : "Accuracy, recall and rows per class of single clients are measured once, at the end of a run; until then this table shows who has what and when it last took part.";
    if (focused) document.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  #select(columns) {
    const [name, sign] = this.#sort;
    const column = columns.find((each) => each[0] === name);
    const key = column ? column[2] : (client) => this.#classValue(client, name.replace("class ", "")) ?? (client.classes.includes(name.replace("class ", "")) ? -1 : null);
    const matching = this.run.clients.filter((client) => !this.#filter || [client.name, client.model, client.dataset, ...client.classes].some((text) => String(text).toLowerCase().includes(this.#filter)));
    return matching.sort((a, b) => {
      const [left, right] = [key(a), key(b)];
      return left == null || right == null ? (left == null) - (right == null) : sign * compareKeys(left, right);
    });
  }

  #drawControls(hasRecall, hasRows) {
    const kinds = [hasRecall && ["recall", "recall"], hasRows && ["rows", "training rows"]].filter(Boolean);
    const parts = [];
    if (kinds.length > 1) parts.push(choice("Per class", kinds, this.#what, (value) => { this.#what = value; this.#draw(); }));
    if (this.ways.length > 1) parts.push(choice("Predicted by", this.ways.map((way) => [way, wayName(way)]), this.#way, (value) => { this.#way = value; this.#draw(); }));
    const total = this.run.classes.length;
    if (total > MAX_CLASSES) {
      const blocks = [];
      for (let first = 0; first < total; first += MAX_CLASSES) blocks.push([first, `${first + 1}–${Math.min(total, first + MAX_CLASSES)}`]);
      parts.push(choice("Classes", blocks, this.#firstClass, (value) => { this.#firstClass = value; this.#draw(); }));
    }
    this.controls.replaceChildren(...parts);
  }

  #heading(key, text) {
    const [current, sign] = this.#sort;
    const direction = current === key ? (sign > 0 ? "ascending" : "descending") : "none";
    const onclick = () => {
      this.#sort = [key, current === key ? -sign : 1];
      this.#draw();
    };
    return h("th", { scope: "col", "aria-sort": direction }, h("button", { type: "button", "data-key": `grid-${key}`, title: text, onclick }, text));
  }

  #row(client, columns, classes, largest) {
    const open = h("button", { type: "button", class: "link", "data-key": `client-${client.id}`, onclick: () => this.onopen(client.id) }, client.name);
    const cells = columns.slice(1).map(([, cell]) => h("td", null, cell(client)));
    const marks = classes.map((name) => {
      const value = this.#classValue(client, name);
      if (value == null) return h("td", null, client.classes.includes(name) ? "•" : "");
      const share = this.#what === "recall" ? value : value / largest;
      return h("td", { class: "heat right", "--share": share.toFixed(3) }, this.#what === "recall" ? (100 * value).toFixed(0) : String(value));
    });
    return h("tr", null, h("th", { scope: "row" }, open, client.diverged ? " (diverged)" : null), cells, marks);
  }

  #drawPager(total, pages) {
    if (pages === 1) {
      this.pager.replaceChildren();
      return;
    }
    const go = (to) => () => {
      this.#page = to;
      this.#draw();
    };
    const first = this.#page * PAGE_ROWS;
    this.pager.replaceChildren(
      h("button", { type: "button", "data-key": "pager-back", disabled: this.#page === 0, onclick: go(this.#page - 1) }, "previous"),
      h("span", null, `${first + 1}–${Math.min(total, first + PAGE_ROWS)} of ${total}`),
      h("button", { type: "button", "data-key": "pager-on", disabled: this.#page === pages - 1, onclick: go(this.#page + 1) }, "next"));
  }
}

// Puts the page together and keeps it up to date.

import { ClientDialog } from "./client.js";
import { Compare } from "./compare.js";
import { h, note } from "./dom.js";
import { RunPage } from "./run.js";
import { RunList } from "./runs.js";
import { openSource } from "./source.js";

const MAX_TICKED = 12; // of a report, which compares its runs from the start

class App {
  #runs = new Map();
  #isBusy = false;
  #isStale = false;

  constructor() {
    this.source = openSource();
    this.dialog = new ClientDialog(this.source);
    this.list = new RunList((id) => this.show(id), (ids) => this.tick(ids));
    this.compare = new Compare();
    this.page = new RunPage((client) => this.dialog.open(this.page.run, client));
    this.problem = h("p", { class: "problem", hidden: true, role: "alert" });
    const state = new URLSearchParams(location.hash.slice(1));
    this.current = state.get("run");
    this.list.ticked = new Set((state.get("compare") ?? "").split(",").filter(Boolean));
    document.getElementById("main").replaceChildren(this.problem, this.list.element, this.compare.element, this.page.element, this.source.isLive ? note("fedproto reads run folders; this page changes nothing in them.") : "");
    this.page.element.hidden = true;
  }

  start() {
    const line = document.getElementById("connection");
    this.source.listen((changed, ids) => this.change(changed, ids), (isOpen) => {
      line.className = isOpen ? "live" : "";
      line.textContent = this.source.isLive ? (isOpen ? "live" : "no connection: is fedproto watch still running?") : this.source.made;
    });
  }

  change(changed, ids) {
    for (const run of changed) this.#runs.set(run.id, run);
    for (const id of [...this.#runs.keys()]) if (!ids.includes(id)) this.#runs.delete(id);
    if (!this.#runs.has(this.current)) this.current = ids[0] ?? null;
    for (const id of this.list.ticked) if (!this.#runs.has(id)) this.list.ticked.delete(id);
    if (!this.source.isLive) ids.slice(0, MAX_TICKED).forEach((id) => this.list.ticked.add(id));
    this.#drawList();
    const shown = new Set([this.current, ...this.list.ticked]);
    if (changed.some((run) => shown.has(run.id))) this.refresh();
  }

  show(id) {
    this.current = id;
    this.#remember();
    this.#drawList();
    this.refresh().then(() => this.page.title.scrollIntoView({ block: "start" }));
  }

  tick() {
    this.#remember();
    this.refresh();
  }

  #drawList() {
    this.list.current = this.current;
    this.list.update([...this.#runs.values()]);
  }

  #remember() {
    const state = new URLSearchParams({ run: this.current ?? "", compare: [...this.list.ticked].join(",") });
    history.replaceState(null, "", `#${state}`);
  }

  // Loads what is shown; changes that arrive meanwhile are loaded once, afterwards.
  async refresh() {
    this.#isStale = true;
    if (this.#isBusy) return;
    this.#isBusy = true;
    try {
      while (this.#isStale) {
        this.#isStale = false;
        await this.#load();
      }
      this.problem.hidden = true;
    } catch (error) {
      this.problem.hidden = false;
      this.problem.textContent = `The page could not be brought up to date: ${error.message}.`;
      console.warn(error);
    } finally {
      this.#isBusy = false;
    }
  }

  async #load() {
    if (this.current) {
      const run = await this.source.run(this.current);
      this.page.element.hidden = !run;
      if (run) this.page.update(run);
    }
    const ticked = [...this.list.ticked].filter((id) => this.#runs.has(id));
    const compared = ticked.length > 1 ? await Promise.all(ticked.map((id) => this.source.run(id))) : [];
    this.compare.update(compared);
  }
}

const app = new App();
app.start();

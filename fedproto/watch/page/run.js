// One run: progress, curves, clients, prototypes, predictions, notes, settings.

import { LineChart } from "./charts.js";
import { ClientGrid } from "./clients.js";
import { bytes, count, distinctWays, duration, lookOf, percent, plain, STATES, wayName } from "./format.js";
import { h, note, section, table } from "./dom.js";
import { PrototypeMap } from "./map.js";
import { Quality } from "./quality.js";

const SERVER_WORDS = { epsilon: "privacy spent (ε)", delta: "δ", noise: "noise" };
const MAX_NOTES = 60;

export class RunPage {
  constructor(onclient) {
    this.title = h("h2", { id: "run" });
    this.lead = h("p", { class: "lead" });
    this.progress = h("progress", { "aria-label": "Rounds" });
    this.problems = h("div", { role: "alert" });
    this.accuracy = new LineChart({ title: "Accuracy, mean over clients ± standard deviation over clients", format: percent, limits: [0, 1] });
    this.loss = new LineChart({ title: "Loss terms, mean over the clients that trained", canLog: true });
    this.traffic = new LineChart({ title: "Traffic of all clients together, per round", format: bytes, canLog: true });
    this.pace = new LineChart({ title: "Seconds per round", format: duration });
    this.server = h("div", { class: "charts" });
    this.serverCharts = new Map();
    this.charts = h("div", { class: "charts" }, this.accuracy.element, this.loss.element, this.traffic.element, this.pace.element);
    this.grid = new ClientGrid(onclient);
    this.map = new PrototypeMap();
    this.quality = new Quality();
    this.events = h("div");
    this.settings = h("div");
    this.element = h("div", null,
      h("section", { "aria-labelledby": "run" }, this.title, this.lead, this.progress, this.problems, this.events, this.charts, this.server),
      this.quality.element, this.grid.element, this.map.element, this.settings);
  }

  update(run) {
    const isOther = this.run?.id !== run.id;
    this.run = run;
    this.title.textContent = run.name;
    this.lead.textContent = leadOf(run);
    this.progress.hidden = run.state !== "running" || !run.rounds_planned;
    this.progress.max = run.rounds_planned || 1;
    this.progress.value = run.rounds_done;
    this.problems.replaceChildren(...run.problems.map((text) => h("p", { class: "problem" }, text)));
    this.#drawEvents(run);
    this.#drawCharts(run);
    this.grid.update(run);
    this.map.update(run);
    this.quality.update(run);
    if (isOther) this.#drawSettings(run);
  }

  #drawCharts(run) {
    const { rounds, columns } = run.series;
    const ways = distinctWays(run);
    this.accuracy.element.hidden = !rounds.length || !ways.length;
    this.accuracy.update(rounds, ways.map((way, index) => ({
      label: wayName(way), values: columns[`accuracy/${way}/mean`] ?? rounds.map(() => null), std: columns[`accuracy/${way}/std`], isHidden: way.endsWith("_own") && way.slice(0, -4) in run.accuracy, ...lookOf(run.look, index) })));
    const terms = Object.keys(columns).filter((name) => name.startsWith("loss/") && name.endsWith("/mean"));
    this.#fill(this.loss, terms.map((name) => [name.split("/")[1], columns[name]]));
    this.#fill(this.traffic, [["sent by clients", columns.bytes_up], ["sent to clients", columns.bytes_down]]);
    this.#fill(this.pace, [["seconds", columns.seconds]]);
    const extras = Object.keys(columns).filter((name) => name.startsWith("server/") || name === "clock" || name === "staleness");
    for (const name of extras) {
      const short = name.replace("server/", "");
      if (!this.serverCharts.has(name)) {
        const chart = new LineChart({ title: SERVER_WORDS[short] ?? `At the server: ${short}`, canLog: true });
        this.serverCharts.set(name, chart);
        this.server.append(chart.element);
      }
      this.#fill(this.serverCharts.get(name), [[short, columns[name]]]);
    }
    for (const [name, chart] of this.serverCharts) chart.element.hidden = !extras.includes(name);
  }

  #fill(chart, entries) {
    const { rounds } = this.run.series;
    const known = entries.filter(([, values]) => values?.some((value) => value != null && value !== 0));
    chart.element.hidden = !rounds.length || !known.length;
    chart.update(rounds, known.map(([label, values], index) => ({ label, values, ...lookOf(this.run.look, index) })));
  }

  #drawEvents(run) {
    const parts = [];
    if (run.failures.length) parts.push(table("Refusals and failures", ["who", "why"], run.failures.map((each) => [each.who, each.text])));
    if (run.notes.length) {
      const shown = run.notes.slice(-MAX_NOTES).reverse();
      parts.push(h("details", { open: run.notes.length <= 3 }, h("summary", null, count(run.notes.length, "note of the algorithm", "notes of the algorithm")), h("ul", null, shown.map((each) => h("li", null, `round ${each.round}: ${each.text}`)))));
    }
    this.events.replaceChildren(...parts);
  }

  #drawSettings(run) {
    const rows = Object.entries(run.settings);
    this.settings.replaceChildren(section("settings", "Configuration", h("details", null, h("summary", null, `${count(rows.length, "setting")} of ${run.name}`), table("Settings", ["setting", "value"], rows, { hideCaption: true }))));
  }
}

// What was run on what, how far it is, and what it reached.
function leadOf(run) {
  const parts = [run.kind === "deployed" ? "A deployed federation" : run.method ? `${run.method}${run.dataset ? ` on ${run.dataset}` : ""}` : "A run", STATES[run.state]];
  const members = run.kind === "deployed" ? "member" : "client";
  if (run.clients.length) parts.push(`${count(run.clients.length, members)}, ${count(run.classes.length, "class", "classes")}`);
  if (run.rows.train) parts.push(`${run.rows.train.toLocaleString("en")} training rows${run.settings.partition ? `, divided by ${partitionWords(run.settings)}` : ""}`);
  parts.push(run.rounds_planned ? `round ${run.rounds_done} of ${run.rounds_planned}` : `round ${run.rounds_done}`);
  if (run.seconds_left != null) parts.push(`about ${duration(run.seconds_left)} left at ${duration(run.seconds_per_round)} per round`);
  else if (run.seconds) parts.push(`${duration(run.seconds)} of training`);
  if (run.best_round) parts.push(`round ${run.best_round} was best by validation`);
  const main = run.main && run.accuracy[run.main];
  if (main) parts.push(`${percent(main.mean)} accuracy by the ${wayName(run.main)}${run.is_validation && run.state === "running" ? " on validation rows" : ""}`);
  return `${parts.join(" · ")}.`;
}

function partitionWords(settings) {
  const words = {
    nway: `classes: about ${settings["partition.ways"]} classes per client and ${settings["partition.shots"]} rows per class`,
    dirichlet: `a Dirichlet distribution over classes${settings["partition.alpha"] ? ` (alpha ${settings["partition.alpha"]})` : ""}`,
    iid: "chance, alike for all clients",
    natural: "the data set's own groups",
  };
  return words[settings.partition] ?? settings.partition;
}

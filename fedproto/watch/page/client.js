// One client in a dialog: confusion matrix, recall, hardest rows, prototypes against the global ones.

import { ago, bytes, count, percent, plain, wayName } from "./format.js";
import { choice, h, note, table } from "./dom.js";
import { confusionTable, recallBars } from "./quality.js";
import { hardRows } from "./reasons.js";

function facts(run, client) {
  const rows = [["classes", client.classes.join(", ") || "–"]];
  if (client.model) rows.push(["model", client.model]);
  if (client.train != null) rows.push(["rows", `${client.train} to train on, ${client.test ?? "–"} to test on`]);
  if (client.times != null) rows.push(["took part in", `${count(client.times, "round")} of ${run.rounds_done}; last in round ${client.last_round || "–"}`]);
  if (client.last_seen) rows.push(["last heard of", `${ago(client.last_seen)}, in round ${client.last_round}`]);
  if (client.refused != null) rows.push(["replies", `${client.refused} refused, ${client.failed} failed${client.reason ? `: ${client.reason}` : ""}`]);
  if (client.traffic?.bytes_up != null) rows.push(["traffic", `${bytes(client.traffic.bytes_up)} sent, ${bytes(client.traffic.bytes_down)} received`]);
  for (const [way, value] of Object.entries(client.accuracy)) {
    const base = way.endsWith("_own") ? client.accuracy[way.slice(0, -4)] : null;
    if (base !== value) rows.push([`accuracy, ${wayName(way)}`, percent(value)]);
  }
  return h("dl", null, rows.map(([term, text]) => [h("dt", null, term), h("dd", null, text)]));
}

function prototypeTable(distances) {
  const rows = distances.map((row) => [row.class, plain(row.distance), plain(row.relative), row.nearest === row.class ? "yes" : `no: ${row.nearest}`]);
  return table("Its prototypes against the global ones", ["class", "distance", "in mean distances between classes", "the global one of its class is nearest"], rows);
}

export class ClientDialog {
  constructor(source) {
    this.source = source;
    this.dialog = document.getElementById("client");
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close();
    });
  }

  async open(run, number) {
    const details = await this.source.client(run.id, number);
    if (!details) return;
    this.run = run;
    this.details = details;
    this.way = null;
    this.#draw();
    if (!this.dialog.open) this.dialog.showModal();
  }

  #draw() {
    const { run, details } = this;
    const { client } = details;
    const ways = Object.keys(details.confusion?.ways ?? {});
    const recalls = Object.keys(client.recall).filter((way) => !way.endsWith("_own"));
    const choices = [...new Set([...ways, ...recalls])];
    const way = choices.includes(this.way) ? this.way : choices.includes(run.main) ? run.main : choices[0];
    const choose = (value) => {
      this.way = value;
      this.#draw();
    };
    this.dialog.replaceChildren(h("div", { class: "inside" },
      h("button", { type: "button", class: "close", onclick: () => this.dialog.close() }, "Close"),
      h("h2", { id: "client-title" }, `Client ${client.name}`), note(run.name),
      details.problem ? h("p", { class: "problem" }, details.problem) : null,
      facts(run, client),
      choices.length > 1 ? choice("Predicted by", choices.map((each) => [each, wayName(each)]), way, choose) : null,
      details.confusion?.ways[way] ? confusionTable(details.confusion.ways[way], run.classes, `Confusion matrix, ${wayName(way)}, all classes compete`) : null,
      details.confusion ? note(`Counted on the ${count(details.confusion.rows, "test row")} whose outputs the run folder keeps, one half of the client's test rows.`)
        : note(run.state === "finished" ? "The run folder keeps no outputs of this client, so there is no confusion matrix." : "Confusion matrix and recall of a client are there when the run has finished."),
      client.recall[way] ? recallBars(client.recall[way], "Recall on all its test rows") : null,
      details.hard_rows?.rows.length ? hardRows(details.hard_rows, run) : null,
      details.prototypes.length ? prototypeTable(details.prototypes) : null));
  }
}

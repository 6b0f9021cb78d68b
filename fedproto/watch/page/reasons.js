// The test rows that a client finds hardest, and what is near them: numbers, never data.

import { percent, wayName } from "./format.js";
import { h, note, table } from "./dom.js";

const distance = (value) => (value == null ? "–" : String(Number(value.toPrecision(3))));

function near(each) {
  const row = each.row == null ? "" : `row ${each.row}, `;
  return h("div", null, `${row}${each.class} at ${distance(each.distance)}`);
}

// In lines rather than columns, so that what is near is in sight on a phone.
function judgement(row) {
  const isRight = row.answer === row.class;
  return [
    h("div", null, `${row.class}: ${percent(row.probability)}`),
    h("div", { class: isRight ? null : "wrong" }, isRight ? "recognised" : `taken for ${row.answer}`),
  ];
}

export function hardRows(found, run) {
  const hasPrototypes = found.rows.some((row) => row.prototypes.length);
  const header = ["test row", "its class: how sure"];
  if (hasPrototypes) header.push("nearest prototypes");
  if (found.has_training) header.push("nearest training rows");
  const rows = found.rows.map((row) => {
    const cells = [String(row.row), judgement(row)];
    if (hasPrototypes) cells.push(row.prototypes.map(near));
    if (found.has_training) cells.push(row.training.map(near));
    return cells;
  });
  return [
    table("Its hardest test rows: those of whose class it is least sure", header, rows, { class: "reasons" }),
    note(`Judged by the ${wayName(run.main ?? "head")}, among the test rows whose outputs the run folder keeps. Row numbers are those in partition.json; distances are L2, the smallest first.`,
      found.has_training ? " fedproto predict --why says as much of any input." : " The run is private, so nothing is kept about single training rows."),
  ];
}

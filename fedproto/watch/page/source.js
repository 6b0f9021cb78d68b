// Where the numbers come from: the server that follows the runs, or the page itself.

class LiveSource {
  isLive = true;
  made = null;
  #runs = new Map();

  async #get(path) {
    const answer = await fetch(path);
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    return answer.json();
  }

  // The run as it is now; only rounds that are not here yet are asked for.
  async run(id) {
    const known = this.#runs.get(id);
    const series = known?.series;
    const query = series?.rounds.length ? `?after=${series.rounds.at(-1)}&epoch=${series.epoch}` : "";
    const run = await this.#get(`api/runs/${encodeURIComponent(id)}${query}`);
    if (run.after > 0) run.series = join(series, run.series);
    this.#runs.set(id, run);
    return run;
  }

  client(id, number) {
    return this.#get(`api/runs/${encodeURIComponent(id)}/clients/${number}`);
  }

  // Calls back with the runs that changed and the ids of all; and with whether there is a connection.
  listen(onchange, onstate) {
    const events = new EventSource("api/events");
    events.onopen = () => onstate(true);
    events.onerror = () => onstate(false);
    events.onmessage = (event) => {
      const { runs, ids } = JSON.parse(event.data);
      onchange(runs, ids);
    };
  }
}

function join(old, added) {
  const columns = {};
  const names = new Set([...Object.keys(old.columns), ...Object.keys(added.columns)]);
  for (const name of names) {
    const before = old.columns[name] ?? old.rounds.map(() => null);
    const after = added.columns[name] ?? added.rounds.map(() => null);
    columns[name] = before.concat(after);
  }
  return { epoch: added.epoch, rounds: old.rounds.concat(added.rounds), columns };
}

class FrozenSource {
  isLive = false;

  constructor(data) {
    this.data = data;
    this.made = data.made;
  }

  async run(id) {
    return this.data.runs.find((run) => run.id === id);
  }

  async client(id, number) {
    return this.data.clients[id]?.[number];
  }

  listen(onchange, onstate) {
    onchange(this.data.runs, this.data.runs.map((run) => run.id));
    onstate(false);
  }
}

export function openSource() {
  const frozen = document.getElementById("frozen");
  return frozen ? new FrozenSource(JSON.parse(frozen.textContent)) : new LiveSource();
}

for (const root of document.querySelectorAll(".bft-watch:not([data-on])")) {
  const data = JSON.parse(root.dataset.watch);
  const { first, step, bar, top, ground, lowest, highest } = data.picture;
  const h = data.readings;
  const all = (name) => [...root.querySelectorAll(name)];
  const one = (name) => root.querySelector(name);
  const sum = (x) => x.reduce((a, b) => a + b, 0);
  const dot = (x, y) => sum(x.map((v, i) => v * y[i]));

  // One layer: the same numbers as bft_ref.notebook.watch.believed.
  const believed = (deviations, drift) => {
    const variance = deviations.map((s) => s * s);
    const rows = h.map((_, i) => {
      const raw = h.map((_, j) =>
        Math.exp(-((i - j) ** 2) / (2 * data.reach ** 2)) / variance[j]);
      const total = sum(raw);
      return raw.map((w) => w / total);
    });
    const heard = rows.map((w, i) => {
      const z = dot(w, h);
      const n = 1 / dot(w, w);
      const spread = dot(w, h.map((v) => (v - z) ** 2));
      const scale = (dot(w, variance) + n * spread) / n; // the prior counts 1
      const seen = scale * (n + 1) / n;
      const gain = variance[i] / (variance[i] + seen);
      const after = 1 / (1 / variance[i] + 1 / seen);
      return {
        n, gain, state: h[i] + gain * (z - h[i]),
        deviation: Math.sqrt(after + drift * drift),
      };
    });
    const of = (name) => heard.map((row) => row[name]);
    return {
      attention: h.map((_, j) => sum(rows.map((w) => w[j])) / h.length),
      n: of("n"), gain: of("gain"), state: of("state"),
      deviation: of("deviation"),
    };
  };

  const height = (v) => ground - (ground - top)
    * (Math.min(Math.max(v, lowest), highest) - lowest) / (highest - lowest);
  const draw = (path, values, line) => path.setAttribute("d",
    values.map((v, i) => `M${first + step * i}${line(v, i)}`).join(""));
  const dots = (values, aside) => values.map((v, i) =>
    `M${first + step * i + aside} ${height(v).toFixed(2)}h0`).join("");
  const errors = (values, s, aside) => values.map((v, i) =>
    `M${first + step * i + aside} ${height(v - s[i]).toFixed(2)}`
    + `V${height(v + s[i]).toFixed(2)}`).join("");
  const others = (values, chosen) =>
    (sum(values) - values[chosen]) / (values.length - 1);

  const noise = one("[data-range=noise]");
  const drift = one("[data-range=drift]");
  const begin = one("button");
  let places, chosen;

  const show = () => {
    const deviations = places.map((place) => data.levels[place]);
    const lost = data.drifts[drift ? drift.value : data.drift];
    const shown = believed(deviations, lost);
    root.dataset.shown = JSON.stringify({ deviations, drift: lost, ...shown });
    const filter = one("[data-panel=filter]");
    filter.querySelector("[data-error=before]")
      .setAttribute("d", errors(h, deviations, -8));
    filter.querySelector("[data-error=after]")
      .setAttribute("d", errors(shown.state, shown.deviation, 8));
    filter.querySelector("[data-dot]")
      .setAttribute("d", dots(shown.state, 8));
    for (const [name, [base, full]] of Object.entries(data.strips)) {
      const scale = bar / Math.max(full, ...shown[name]);
      draw(filter.querySelector(`[data-bar=${name}]`), shown[name],
        (v) => ` ${base}V${(base - scale * v).toFixed(2)}`);
    }
    const say = (panel, values) => {
      for (const name of Object.keys(data.strips)) {
        const v = values(name);
        panel.querySelector(`[data-value=${name}]`).textContent =
          name === "attention" ? `${(100 * v).toFixed(0)} %` : v.toFixed(2);
      }
    };
    say(filter, (name) => shown[name][chosen]);
    say(one("[data-panel=plain]"), (name) => data.plain[name][chosen]);
    for (const band of all(".chosen")) {
      band.setAttribute("x", first + step * (chosen - 0.5));
    }
    const range = (input, level) => {
      input.setAttribute("aria-valuetext", `± ${level.toFixed(2)} degrees`);
      one(`[data-setting=${input.dataset.range}]`).textContent =
        `± ${level.toFixed(2)}°`;
    };
    noise.value = places[chosen];
    range(noise, deviations[chosen]);
    if (drift) range(drift, lost);
    one(".readout").textContent =
      `Reading ${chosen + 1} says ${h[chosen].toFixed(1)}°. It gets `
      + `${(100 * shown.attention[chosen]).toFixed(0)} % of the attention `
      + `and ends at ${shown.state[chosen].toFixed(1)} ± `
      + `${shown.deviation[chosen].toFixed(2)}°. The others move by a gain `
      + `of ${others(shown.gain, chosen).toFixed(2)} and end at ± `
      + `${others(shown.deviation, chosen).toFixed(2)}°.`;
  };
  const choose = (token) => {
    chosen = token;
    one(`input[type=radio][value="${token}"]`).checked = true;
    show();
  };
  const restart = () => {
    places = h.map(() => data.usual);
    if (drift) drift.value = data.drift;
    choose(data.odd);
  };
  root.dataset.on = "";
  for (const input of all("input, button")) input.disabled = false;
  for (const radio of all("input[type=radio]")) {
    radio.addEventListener("change", () => choose(Number(radio.value)));
  }
  for (const column of all(".column")) {
    column.addEventListener("click", () => choose(Number(column.dataset.token)));
  }
  noise.addEventListener("input", () => {
    places[chosen] = Number(noise.value);
    show();
  });
  if (drift) drift.addEventListener("input", show);
  begin.addEventListener("click", restart);
  restart();
}

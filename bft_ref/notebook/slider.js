for (const root of document.querySelectorAll(".bft-slider:not([data-on])")) {
  const data = JSON.parse(root.dataset.frames);
  const one = (name) => root.querySelector(name);
  const input = one("input");
  const curves = root.querySelectorAll("[data-curve]");
  const names = root.querySelectorAll(".name");
  const show = () => {
    const frame = data.frames[input.value];
    curves.forEach((path, i) =>
      path.setAttribute("d", data.paths[frame.paths[i]]));
    names.forEach((name, i) => name.setAttribute("style", frame.names[i]));
    one(".setting").textContent = frame.setting;
    one(".readout").textContent = frame.readout;
    one(".plot > svg").setAttribute("aria-label", frame.chart);
    input.setAttribute("aria-valuetext", frame.spoken);
    root.dataset.value = frame.number;
    root.dataset.index = input.value;
  };
  root.dataset.on = "";
  input.disabled = false;
  input.value = root.dataset.index;
  input.addEventListener("input", show);
  show();
}

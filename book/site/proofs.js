// One button opens, and closes, every proof of a page. Solutions stay as
// they are. Without it each proof opens by itself.
document.addEventListener("DOMContentLoaded", () => {
  const folded = [...document.querySelectorAll(".cell details.hide")];
  for (const cell of folded) {
    // the builder's own name would hide the title from who listens
    cell.querySelector("summary").removeAttribute("aria-label");
  }
  const proofs = folded.filter((cell) => !cell.closest(".cell.solution"));
  const heading = document.querySelector("article h1");
  if (!proofs.length || !heading) return;
  const button = document.createElement("button");
  button.type = "button";
  button.className = "bft-proofs";
  button.textContent = "Show all proofs";
  const say = () =>
    button.setAttribute("aria-pressed", proofs.every((cell) => cell.open));
  button.addEventListener("click", () => {
    const open = button.getAttribute("aria-pressed") !== "true";
    for (const cell of proofs) cell.open = open;
  });
  for (const cell of proofs) cell.addEventListener("toggle", say);
  say();
  heading.after(button);
});

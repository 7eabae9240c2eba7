// On paper nothing scrolls: what is wider than a page is printed smaller.
const WIDE = "article div.math, article table";
addEventListener("beforeprint", () => {
  const page = 650; // CSS pixels of an upright A4 page inside its margins
  for (const node of document.querySelectorAll(WIDE)) {
    const table = node.tagName === "TABLE";
    const { width } = node.style;
    node.style.zoom = "";
    if (table) node.style.width = "1px"; // its narrowest
    const needs = table ? node.offsetWidth : node.scrollWidth;
    node.style.width = width;
    if (needs > page) node.style.zoom = page / needs;
  }
});
addEventListener("afterprint", () => {
  for (const node of document.querySelectorAll(WIDE)) node.style.zoom = "";
});

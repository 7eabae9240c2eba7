// How Sphinx's search ranks and shows what it finds; it reads this after its
// own settings. Pages that say a thing come before functions that do it.
Object.assign(Scorer, {
  objNameMatch: 8,
  objPartialMatch: 2,
  objPrio: { 0: 3, 1: 2, 2: -5 },
  score: ([page, title, , description, score]) => {
    const asked = new URLSearchParams(location.search).get("q").toLowerCase();
    if (description === null && title.toLowerCase().includes(asked)) score += 5;
    if (description?.startsWith("Python attribute")) score -= 6;
    if (/\/(api|bibliography|changes|slips)/.test(page)) score -= 3;
    const chapter = page.match(/^notebooks\/(\d+)-/);
    return chapter ? score + 1 - chapter[1] / 100 : score; // in their order
  },
});

// From a folder no page can be read: it has results without excerpts.
if (location.protocol === "file:")
  DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;

// An excerpt begins at a word that was asked for, in prose where it is there,
// else in code; never in what is folded.
Search.makeSearchSummary = (html, words, anchor) => {
  const page = new DOMParser().parseFromString(html, "text/html");
  const part =
    (anchor && page.getElementById(anchor.slice(1))) ||
    page.querySelector("article");
  if (!part) return null;
  const drop =
    "h1, p:has(> a[href*='colab']), details.hide, nav, .toctree-wrapper, " +
    ".headerlink, script, style, svg, div.math";
  for (const node of part.querySelectorAll(drop)) node.remove();
  for (const formula of part.querySelectorAll(".math"))
    formula.textContent = formula.textContent
      .replace(/\\[()]|[{}]|\\(mathrm|text|bar|hat|tilde)\b/g, "")
      .replace(/\\(\w+) ?/g, "$1");
  const code = [...part.querySelectorAll(".cell, .highlight")];
  for (const node of code) node.remove();
  const text = [part, ...code]
    .map((node) => node.textContent.trim())
    .join(" ")
    .replace(/\s+/g, " ");
  const asked = `(?<!\\p{L})(${[...words].map(_escapeRegExp).join("|")})`;
  const found = [`${asked}(?!\\p{L})`, asked]
    .map((one) => text.search(new RegExp(one, "iu")))
    .find((at) => at >= 0);
  const start = found > 120 ? text.indexOf(" ", found - 120) + 1 : 0;
  const excerpt = document.createElement("p");
  excerpt.className = "context";
  excerpt.textContent =
    (start ? "… " : "") +
    text.slice(start, start + 240) +
    (start + 240 < text.length ? " …" : "");
  return excerpt;
};

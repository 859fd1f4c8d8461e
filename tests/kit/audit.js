// What an audit of accessibility looks for first: a function that returns what is wrong.
() => {
  const wrong = [];
  const shown = (each) => each.getClientRects().length > 0;
  const start = (each) => each.outerHTML.slice(0, 80);
  const all = (selector) => [...document.querySelectorAll(selector)];

  const named = "a, button, input:not([type=hidden]), summary, meter, [role=img], [role=region]";
  for (const each of all(named)) {
    const name = each.getAttribute("aria-label") || each.labels?.[0]?.textContent || each.textContent;
    if (shown(each) && !name.trim()) wrong.push(`no name: ${start(each)}`);
  }

  const ids = new Set();
  for (const { id } of all("[id]")) {
    if (ids.has(id)) wrong.push(`id twice: ${id}`);
    ids.add(id);
  }
  for (const attribute of ["aria-labelledby", "aria-describedby"]) {
    for (const each of all(`[${attribute}]`)) {
      const id = each.getAttribute(attribute);
      if (!ids.has(id)) wrong.push(`${attribute} of nothing: ${id}`);
    }
  }

  for (const table of all("table")) {
    if (!table.caption?.textContent.trim()) wrong.push(`no caption: ${start(table)}`);
    if (!table.querySelector("th[scope]")) wrong.push(`no headings: ${start(table)}`);
  }
  for (const image of all("img:not([alt])")) wrong.push(`no alt: ${start(image)}`);

  let level = 0;
  for (const heading of all("h1, h2, h3")) {
    if (+heading.tagName[1] > level + 1) wrong.push(`a heading skips a level: ${start(heading)}`);
    level = +heading.tagName[1];
  }

  const rgb = (text) => (text.startsWith("rgb") ? text.match(/[\d.]+/g).map(Number) : null);
  const linear = (part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const light = (color) => {
    const [r, g, b] = color.slice(0, 3).map((each) => linear(each / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (each) => {
    for (let behind = each; behind; behind = behind.parentElement) {
      const color = rgb(getComputedStyle(behind).backgroundColor);
      if (color && (color[3] ?? 1) === 1) return color;
    }
    return null;
  };
  const hasText = (each) => [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  for (const each of all("body *")) {
    if (!shown(each) || !hasText(each) || each.closest("svg, :disabled, .hidden, .skip, .old")) continue;
    const front = rgb(getComputedStyle(each).color), back = ground(each);
    if (!front || !back) continue;
    const [more, less] = [light(front), light(back)].sort((a, b) => b - a);
    const ratio = (more + 0.05) / (less + 0.05);
    if (ratio < 4.5) wrong.push(`contrast ${ratio.toFixed(2)}: ${start(each)}`);
  }
  return wrong;
}

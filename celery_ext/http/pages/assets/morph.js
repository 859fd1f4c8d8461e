// Makes one tree of nodes like another: nodes that are the same keep their focus and selection.

export function morph(old, fresh) {
  const keyed = new Map();
  for (const each of old.children) if (each.dataset.key) keyed.set(each.dataset.key, each);
  let place = old.firstChild;
  for (const node of [...fresh.childNodes]) {
    const known = node.dataset?.key && keyed.get(node.dataset.key);
    if (known) keyed.delete(node.dataset.key); // several rows may have one key
    if (known && known !== place) old.insertBefore(known, place);
    const mine = known || place;
    if (mine && alike(mine, node)) {
      if (mine.nodeType === Node.TEXT_NODE) {
        if (mine.data !== node.data) mine.data = node.data;
      } else if (mine.nodeType === Node.ELEMENT_NODE) {
        attributes(mine, node);
        morph(mine, node);
      }
      place = mine.nextSibling;
    } else {
      old.insertBefore(node, place);
    }
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}

function alike(one, other) {
  return one.nodeType === other.nodeType && one.nodeName === other.nodeName &&
    (one.dataset?.key || "") === (other.dataset?.key || "");
}

function attributes(old, fresh) {
  for (const { name } of [...old.attributes]) {
    // The reader decides whether it is open.
    if (!fresh.hasAttribute(name) && !(old.nodeName === "DETAILS" && name === "open")) old.removeAttribute(name);
  }
  for (const { name, value } of [...fresh.attributes]) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
}

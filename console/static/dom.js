// Functions that create elements, and that change one tree into another with few DOM operations.
// Values only become text nodes and attributes, never markup.

const SVG = new Set(["svg", "path", "circle", "rect", "line"]);

export function h(tag, props, ...children) {
  const node = SVG.has(tag)
    ? document.createElementNS("http://www.w3.org/2000/svg", tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node[name] = value;
    else if (name === "style") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else if (name === "href" && !/^(#|https?:)/.test(value)) continue;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  append(node, children);
  return node;
}

function append(node, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) append(node, child);
    else node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

const HANDLERS = ["onclick", "oninput", "onchange", "onsubmit", "onkeydown", "ontoggle"];
// Attributes that the user changes, which a new rendering must not reset.
const LIVE = new Set(["open", "style"]);

export function morph(from, to) {
  if (from.nodeType !== to.nodeType || from.nodeName !== to.nodeName) {
    from.replaceWith(to);
    return;
  }
  if (from.nodeType === Node.TEXT_NODE) {
    if (from.data !== to.data) from.data = to.data;
    return;
  }
  const former = from.getAttribute("value");
  for (const { name } of [...from.attributes])
    if (!to.hasAttribute(name) && !LIVE.has(name)) from.removeAttribute(name);
  for (const { name, value } of to.attributes)
    if (from.getAttribute(name) !== value && !LIVE.has(name)) from.setAttribute(name, value);
  // The Content-Security-Policy would refuse it as an attribute.
  if (from.style.cssText !== to.style.cssText) from.style.cssText = to.style.cssText;
  for (const name of HANDLERS) if (from[name] !== to[name]) from[name] = to[name];
  morphChildren(from, to);
  const busy = document.activeElement === from;
  if (from instanceof HTMLSelectElement && !busy && from.value !== to.value) from.value = to.value;
  if (!(from instanceof HTMLInputElement)) return;
  if (from.type === "checkbox") from.checked = to.hasAttribute("checked");
  // Keep what the user types until the URL has another value.
  else if (!busy && former !== to.getAttribute("value")) from.value = to.getAttribute("value") ?? "";
}

export function morphChildren(from, to) {
  const keyed = new Map();
  for (const child of from.childNodes) {
    const key = child.dataset?.key;
    if (key !== undefined) keyed.set(key, child);
  }
  let at = from.firstChild;
  const last = to.childNodes.length;
  for (const wanted of [...to.childNodes]) {
    const key = wanted.dataset?.key;
    if (key !== undefined) {
      const known = keyed.get(key);
      if (known === undefined) {
        from.insertBefore(wanted, at);
        continue;
      }
      keyed.delete(key);
      if (known === at) at = at.nextSibling;
      else from.insertBefore(known, at);
      morph(known, wanted);
      continue;
    }
    while (at?.dataset?.key !== undefined && at.nodeName !== wanted.nodeName) at = at.nextSibling;
    if (at === null || at.dataset?.key !== undefined) {
      from.insertBefore(wanted, at);
      continue;
    }
    const next = at.nextSibling;
    morph(at, wanted);
    at = next;
  }
  while (from.childNodes.length > last) from.lastChild.remove();
}

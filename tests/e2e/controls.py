"""What tests of several pages ask the browser about controls and text."""

UNNAMED = """() => [...document.querySelectorAll("button, input, select, [role=option], [role=listbox], a")]
    .filter((control) => {
        const label = control.labels?.[0]?.textContent ?? "";
        return !(control.getAttribute("aria-label") || label.trim() || control.textContent.trim());
    }).map((control) => control.outerHTML)"""
"""The controls that have no name for a screen reader."""

FAINT = """() => {
    const SEEN = { opacityProperty: true, visibilityProperty: true };
    const numbers = (colour) => {
        const found = colour.match(/[\\d.]+/g).map(Number);
        return [...found.slice(0, 3), found[3] ?? 1];
    };
    const over = (top, below) => [0, 1, 2].map((at) => top[at] * top[3] + below[at] * (1 - top[3]));
    const behind = (element) => {
        const layers = [];
        for (let each = element; each; each = each.parentElement) {
            layers.push(numbers(getComputedStyle(each).backgroundColor));
        }
        const canvas = matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18] : [255, 255, 255];
        return layers.reverse().reduce((below, top) => over(top, below), canvas);
    };
    const light = (colour) => {
        const [red, green, blue] = colour.map((value) => {
            const share = value / 255;
            return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
        });
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const faint = [];
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
        const element = texts.currentNode.parentElement;
        const text = texts.currentNode.textContent.trim();
        if (!text || element.closest("script, style, svg, :disabled") || !element.checkVisibility(SEEN)) continue;
        const paper = behind(element), style = getComputedStyle(element);
        const [high, low] = [light(over(numbers(style.color), paper)), light(paper)].sort((a, b) => b - a);
        const size = parseFloat(style.fontSize);
        const large = size >= 24 || (size >= 18.6 && style.fontWeight >= 700);
        const ratio = (high + 0.05) / (low + 0.05);
        if (ratio < (large ? 3 : 4.5)) faint.push(`${text.slice(0, 40)}: ${ratio.toFixed(2)}`);
    }
    return faint;
}"""
"""Texts whose contrast is below that of WCAG's level AA: 4.5, or 3 if they are large."""

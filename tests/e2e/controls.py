"""What tests of several pages ask the browser about controls."""

UNNAMED = """() => [...document.querySelectorAll("button, input, select, [role=option], [role=listbox], a")]
    .filter((control) => {
        const label = control.labels?.[0]?.textContent ?? "";
        return !(control.getAttribute("aria-label") || label.trim() || control.textContent.trim());
    }).map((control) => control.outerHTML)"""
"""The controls that have no name for a screen reader."""

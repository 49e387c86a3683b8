"""The web application: routes, limits, errors and pages."""

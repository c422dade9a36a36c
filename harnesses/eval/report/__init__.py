"""From the turns of runs to rows, tables, charts and pages."""

"""Human step labels: `jprm annotate select`, `serve`, `report` and `export`."""

"""The paper's tables, run again: rows as data in ``tables/``, ``run.py`` runs them, ``report.py`` writes the page."""

"""The report of a comparison: statistics over seeds and sentences, tables, plots, one page."""

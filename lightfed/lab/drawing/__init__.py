"""Charts, tables and pages for any content."""

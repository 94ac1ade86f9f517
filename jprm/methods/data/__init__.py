"""Sources of step labels: their readers, and what prepares folders of records from them."""

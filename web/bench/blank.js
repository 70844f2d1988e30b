// An empty page.

"""Contenders in Chromium pages; the JavaScript that runs there is in web/bench."""

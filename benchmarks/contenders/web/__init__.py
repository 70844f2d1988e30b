"""Contenders of the browser, each in a page of Chromium: what they run there is in web/bench."""

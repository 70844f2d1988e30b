// A page with nothing on it.

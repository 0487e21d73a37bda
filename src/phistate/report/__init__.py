"""One look for every report: a page that stands alone, and the plots on it."""

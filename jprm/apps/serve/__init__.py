"""`jprm serve`: scores over HTTP, on one device thread that packs what waits together."""

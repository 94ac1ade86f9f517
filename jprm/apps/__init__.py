"""What people meet: the command line, servers, annotation, reports, plans."""

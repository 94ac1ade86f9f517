"""`jprm report`: one page with the verdict, the figures, and every chain with its scores."""

"""One page that shows what a suite found: verdict, figures, and every chain with its scores."""

"""One module per noun of the HTTP interface."""

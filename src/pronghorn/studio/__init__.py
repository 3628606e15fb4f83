"""`pronghorn studio`: run folders and recipes in a browser. Everything it shows comes from files that the command line writes,
and everything it does is a command a person could have typed. No other room imports this one, except the command line."""

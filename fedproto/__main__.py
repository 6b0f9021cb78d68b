from fedproto.cli.main import main

main()

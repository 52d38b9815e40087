import java.util.Arrays;
import java.util.Random;
import java.util.Scanner;

/**
 * A service with a table that never changes, and some garbage all the time.
 *
 * <p>Argument: the table's size, MiB. Prints "ready", then answers each input line with "intact" or "damaged".
 */
public final class Service {
    private static final int PART = 1 << 10;

    private static volatile byte[] garbage;

    private Service() {}

    private static byte[] part(int number) {
        byte[] part = new byte[PART];
        new Random(number).nextBytes(part);
        return part;
    }

    private static void serve() {
        try {
            while (true) {
                garbage = new byte[32 << 10];
                Thread.sleep(100);
            }
        } catch (InterruptedException e) {
            Thread.currentThread().interrupt();
        }
    }

    public static void main(String[] args) {
        byte[][] table = new byte[(Integer.parseInt(args[0]) << 20) / PART][];
        for (int at = 0; at < table.length; at++) {
            table[at] = part(at);
        }
        Thread requests = new Thread(Service::serve);
        requests.setDaemon(true);
        requests.start();
        System.out.println("ready");
        Scanner input = new Scanner(System.in);
        while (input.hasNextLine()) {
            input.nextLine();
            boolean intact = true;
            for (int at = 0; at < table.length; at++) {
                intact &= Arrays.equals(table[at], part(at));
            }
            System.out.println(intact ? "intact" : "damaged");
        }
    }
}

;; Derivatives of a net by its input, and plain functions of compile time.
(defknob width 8)
(defknob degree 3 :min 1 :max 6)

(defdata points (npy "p.npz" :fields ((x f32 [2]) (y f32))))

(defparameter scales (mapcar (lambda (i) (expt 1/2 i)) (range degree)))

(defun total (xs &optional (start 0))
  (if (null xs) start (total (rest xs) (+ start (first xs)))))

(deflayer dense (x out)
  (let ((in (dim x -1)))
    (+ (matmul x (param "w" [in out] :init (uniform :low -0.5 :high 0.5)))
       (param "b" [out] :init zeros))))

(deflayer net (x)
  (let ((h (tanh (dense x width :name "one"))))
    (squeeze (dense (concat h (* h h) :axis -1) 1 :name "two") :axis -1)))

(defun field-loss (x y)
  (let* ((u (net x))
         (g (grad (sum u) x))
         (slope (sum (* g g) :axis -1))
         (weight (where (> y 0) 1.0 (total scales))))
    (list (sum (* weight (+ slope (power (- u y) 2)))) (dim x 0))))

(defoptimizer step-down (param grad &key (lr 0.1))
  :state ()
  (list (- param (* lr grad))))

(defrun fit
  :data (batches points :batch 4 :shuffle true)
  :loss field-loss
  :optimizer (step-down :lr 0.05)
  :steps 5)
